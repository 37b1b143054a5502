// The CUDA backend of fake_card.py: it has one card, which does nothing, and for which nothing has to wait.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

// autograd asks for the device and the stream of every tensor
struct FakeCardGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override {
    return Device(DeviceType::CUDA, 0);
  }
  Device exchangeDevice(Device) const override {
    return getDevice();
  }
  Stream getStream(Device) const noexcept override {
    return Stream(Stream::DEFAULT, getDevice());
  }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeCardGuard)

} // namespace c10::impl

namespace at {

// torch finds the class by this very name
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace at

"""What was seen of a training script, a stage or another, and what it computes."""

from dataclasses import dataclass

from .arithmetic import ADAMW, BUCKETS, CLIPPING, FUSED_ADAMW, UNSCALING, Work, shape_name


@dataclass(kw_only=True)
class Seen:
    """What watch.py saw of a script: a line of its record, "seen"."""

    unit: str  # in which a step is counted: "tok", "sample" or "step"
    batch_size: int | None  # of the largest batch
    seq_len: int | None
    accum: int  # micro-batches of a rank for each update, if their losses are shares of one; else 1
    world_size: int
    loaders: int  # processes and threads that it started, most likely to load its data
    framework: str | None  # the package that calls the optimizer
    # its model
    parameters: int
    model_name: str = "model"  # what its code calls the largest module that it trains, as "self.net"; "" if unknown
    can_compile_in_place: bool = False  # by MODEL.compile(), which compiles a class of the script's own
    shape: dict | None  # of a GPT: see arithmetic.shape_of()
    weights: str  # the dtype of the largest parameter, as "float32"
    tf32: bool  # whether PyTorch's flags allow it, also where the device has no units for it
    autocast: str | None  # the 16-bit dtype in which it multiplies; None if that is the dtype of its weights
    enters_autocast: bool  # whether torch.autocast chooses this dtype; else the script casts by itself
    emulated: bool  # whether the device has no units for this dtype
    compile: bool  # whether compiled code multiplied
    ddp: bool
    # its updates
    fused: bool | None  # None if no optimizer has such a kernel
    optimizer: str  # the class that could be fused; if none, what has no fused kernel: "RMSprop", "sparse gradients"
    schedules: bool  # whether learning rates change
    groups: bool  # whether some parameters have another weight decay than the first group
    clips: str | None  # what gradients are clipped by, "norm" or "value"
    # what it could use
    device: str
    can_tf32: bool  # whether the device has such units
    amp_dtype: str  # the 16-bit dtype that the device multiplies natively, or "float32"
    compile_problem: str | None  # why torch.compile can't work here
    # what the operations of one step show
    profiled: bool = False  # whether they were seen
    multiplies: bool = True  # whether one of them is a matmul, a convolution or the like
    attention: bool = False
    sdpa: str | None = None  # the kernel that scaled_dot_product_attention chose
    attention_drops: bool = False  # whether that kernel is "math", and has dropout
    # the columns of the last matmul; in compiled code, which does not show them, the rows of the largest embedding, if
    # a layer has as many outputs
    vocabulary: int | None = None
    busy_ms: float | None = None  # for how many milliseconds of the profiled step a kernel ran on the card
    reads: int = 0  # copies from the card to the CPU in a step

    @classmethod
    def of_line(cls, line):
        """Return the Seen of a line of a record."""
        return cls(**{name: value for name, value in line.items() if name in cls.__dataclass_fields__})

    @property
    def has_flash_attention(self):
        """Whether its attention ran as one kernel."""
        return self.sdpa not in (None, "math")

    def idle_share(self, dt_ms):
        """Return the share of a step of dt_ms in which a card has nothing to do; None if that is not known."""
        return None if self.busy_ms is None else max(0.0, 1 - self.busy_ms / dt_ms)

    @property
    def work(self):
        """The Work of a GPT's micro-batch; None for a model that is not a GPT."""
        if not self.shape:
            return None
        dtype = self.autocast or self.weights
        in_tf32 = dtype == "float32" and self.tf32 and self.can_tf32
        update = FUSED_ADAMW if self.fused else ADAMW
        if self.clips:
            update += CLIPPING
        if dtype == "float16":
            update += UNSCALING
        if self.ddp:
            update += BUCKETS
        return Work(
            self.shape,
            self.batch_size,
            matmul_dtype="tf32" if in_tf32 else dtype,
            on_cuda=self.device == "cuda",
            compiled=self.compile,
            flash=self.has_flash_attention,
            update=update,
            accum=self.accum,
        )


def words_on_model(seen):
    """Return what a script trains: its model and its batch, as far as they are known."""
    words = f"{seen.parameters:,} parameters"
    if seen.shape:
        words = f"{shape_name(seen.shape)}, {words}"
    if seen.batch_size:
        words += f", B {seen.batch_size}"
    if seen.seq_len:
        words += f", T {seen.seq_len}"
    return words

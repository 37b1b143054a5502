"""Weights on disk: Hugging Face's libraries as the oracle, both ways, and what must be refused."""

import json
import os
import sys

import pytest
import torch
from conftest import FLOAT32, definitions

import model as model_module
from data import UNFINISHED, InputError, write_whole
from model import GPT, GPTConfig, check_save

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
attention = definitions("s05", "attention", F=torch.nn.functional)["attention"]


def make_gpt(n_layer=3, n_head=4):
    """A small GPT, the same at each call, with random biases and gains and weights that errors show in."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=300, block_size=24, n_layer=n_layer, n_head=n_head, n_embd=48), attention)
    for p in gpt.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return gpt


@pytest.fixture
def saved(tmp_path):
    """The directory of a checkpoint that save_pretrained wrote."""
    make_gpt().save_pretrained(tmp_path / "saved", tokenizer="gpt2-bytes")
    return tmp_path / "saved"


@pytest.fixture
def hf(saved):
    """transformers' model of the same checkpoint, which misses no weight and finds none too many."""
    hf, info = transformers.GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    return hf


def load(directory):
    return GPT.from_pretrained(directory, attention)


def assert_same_logits(gpt, hf):
    idx = torch.randint(gpt.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gpt(idx), hf(idx).logits, atol=1e-4, rtol=0)
    assert {p.dtype for p in gpt.parameters()} == {torch.float32}


def assert_refused(directory, *words):
    """from_pretrained raises an InputError of one line that names the directory and has the words."""
    with pytest.raises(InputError) as error:
        load(directory)
    message = str(error.value)
    assert str(directory) in message
    assert message.isprintable()
    assert "pass another checkpoint" in message
    for word in words:
        assert word in message


def contents(folder):
    """{path: bytes} of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_config(directory, **changes):
    """Change settings of a checkpoint's config.json."""
    settings = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(settings | changes))


def write_tensors(directory, changes):
    """Change tensors of a checkpoint's model.safetensors, or add some. changes: {name: tensor}."""
    tensors = safetensors.load_file(directory / WEIGHTS)
    safetensors.save_file(tensors | changes, directory / WEIGHTS)


def read_header(directory):
    """The header of a checkpoint's model.safetensors, a dict, and the bytes behind it."""
    content = (directory / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_header(directory, header, numbers):
    """Write model.safetensors anew: a header in JSON, and the bytes behind it."""
    text = header.encode()
    (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def test_transformers_computes_what_the_saved_model_did(hf):
    assert_same_logits(make_gpt(), hf)


def test_a_saved_model_loads_as_it_was(saved):
    expected, loaded = make_gpt(), load(saved)
    assert loaded.config == expected.config
    assert loaded.tokenizer == "gpt2-bytes"
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_loads_the_file_that_transformers_saved(hf, tmp_path):
    hf.save_pretrained(tmp_path / "theirs")
    assert_same_logits(load(str(tmp_path / "theirs")), hf)


def test_loads_the_shards_that_transformers_saved(hf, tmp_path):
    hf.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert not (tmp_path / "theirs" / WEIGHTS).exists()
    assert_same_logits(load(str(tmp_path / "theirs")), hf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_loads_what_openai_published_from_the_hubs_cache(hf, tmp_path, monkeypatch, dtype):
    hub = pytest.importorskip("huggingface_hub")
    cached = tmp_path / "models--openai-community--gpt2-xl"
    hf.config.save_pretrained(cached / "snapshots" / "0")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    tensors = {key.removeprefix("transformer."): t.clone() for key, t in hf.to(dtype).state_dict().items()}
    for i in range(3):  # the causal masks
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.uint8).tril()
    safetensors.save_file(tensors, cached / "snapshots" / "0" / WEIGHTS)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert_same_logits(load("gpt2-xl"), hf.float())


def test_openais_names_ask_for_the_package_that_fetches_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="^gpt2 .*: pip install huggingface_hub$"):
        load("gpt2")


def test_saves_float32_aligned_to_eight_bytes(saved):
    make_gpt().bfloat16().save_pretrained(saved)
    assert {t.dtype for t in safetensors.load_file(saved / WEIGHTS).values()} == {torch.float32}
    header_length = int.from_bytes((saved / WEIGHTS).read_bytes()[:8], "little")
    assert header_length % 8 == 0


def test_a_loaded_model_is_saved_with_the_name_of_its_tokenizer(saved, tmp_path):
    load(saved).save_pretrained(tmp_path / "copy")
    assert load(tmp_path / "copy").tokenizer == "gpt2-bytes"


@pytest.mark.parametrize("tokenizer, end_of_text", [("gpt2", 50256), ("gpt2-bytes", None)])
def test_the_id_that_ends_a_text_is_that_of_the_tokenizer(saved, tokenizer, end_of_text):
    make_gpt().save_pretrained(saved, tokenizer)
    settings = json.loads((saved / CONFIG).read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (end_of_text, end_of_text)


def test_a_stages_weights_load_in_transformers(stages, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question: " * 50)
    stages("s06", *FLOAT32, "--data", tmp_path / "text.txt", "--save", tmp_path / "weights")
    gpt = load(tmp_path / "weights")
    assert gpt.transformer.h[0].mlp.c_fc.bias.abs().max() > 0  # it was trained
    assert_same_logits(gpt, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "weights"))


@pytest.mark.parametrize("existing", ["empty", "saved", "link to saved", "link to what is not there"])
def test_save_makes_or_replaces_a_checkpoint(saved, tmp_path, existing):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link to saved").symlink_to(saved)
    (tmp_path / "link to what is not there").symlink_to(tmp_path / "a" / "b")
    make_gpt(n_head=6).save_pretrained(tmp_path / existing)
    assert load(tmp_path / existing).config.n_head == 6
    assert sorted(os.listdir(tmp_path / existing)) == [CONFIG, WEIGHTS]


def assert_save_is_refused(directory, words):
    """check_save and save_pretrained raise an InputError of one line with the words, and change no file."""
    before = contents(directory.parent)
    with pytest.raises(InputError) as early:
        check_save(directory)
    with pytest.raises(InputError) as late:
        make_gpt().save_pretrained(directory)
    assert str(early.value) == str(late.value)
    assert str(early.value).startswith(f"--save {directory} can't be written: ")
    assert str(early.value).isprintable()
    assert words in str(early.value)
    assert contents(directory.parent) == before


def test_save_refuses_a_file_of_the_users_beside_a_checkpoint(saved):
    (saved / "notes\x1b[31m.txt").write_text("mine")
    words = r"it holds 'notes\x1b[31m.txt', which --save did not write; pass another directory"
    assert_save_is_refused(saved, words)


@pytest.mark.parametrize("text", ["{}", '{"tokenizer": "mine"}', "[]", "mine", "[" * 300_000])
def test_save_refuses_a_config_of_the_users(tmp_path, text):
    (tmp_path / CONFIG).write_text(text)
    assert_save_is_refused(tmp_path, f"it holds '{CONFIG}', which --save did not write")


def test_save_refuses_weights_of_the_users(tmp_path):
    safetensors.save_file({"mine": torch.ones(3)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert_save_is_refused(tmp_path, f"it holds '{WEIGHTS}', which --save did not write")


def test_save_refuses_weights_of_the_users_beside_our_config(saved):
    safetensors.save_file(safetensors.load_file(saved / WEIGHTS), saved / WEIGHTS, metadata={"format": "pt"})
    assert_save_is_refused(saved, f"it holds '{WEIGHTS}', which --save did not write")


def test_save_refuses_a_config_of_the_users_beside_our_weights(saved):
    (saved / CONFIG).write_text("{}")
    assert_save_is_refused(saved, f"it holds '{CONFIG}', which --save did not write")


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
def test_save_refuses_what_can_be_no_directory(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=f"--save .*{name} can't be written: .*; pass another directory"):
        make_gpt().save_pretrained(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_weights_larger_than_the_disk_are_refused_before_the_run(tmp_path):
    with pytest.raises(InputError, match=r"the weights take 1000000000\.00 GB, and \d+\.\d\d GB are free"):
        check_save(tmp_path / "not" / "there", nbytes=10**18)
    assert os.listdir(tmp_path) == []


class Interruption:
    """Stands in for model.write_whole, and is interrupted once it has written a number of files."""

    def __init__(self, files):
        self.files = files

    def __call__(self, path, *chunks):
        if self.files == 0:
            raise KeyboardInterrupt
        self.files -= 1
        write_whole(path, *chunks)


def test_an_interrupted_first_save_leaves_no_checkpoint_and_can_be_repeated(tmp_path, monkeypatch):
    directory = tmp_path / "new"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model_module, "write_whole", Interruption(files=1))
        make_gpt().save_pretrained(directory)
    assert os.listdir(directory) == [WEIGHTS]
    assert_refused(directory, f"{CONFIG}: there is no such file")
    make_gpt(n_layer=1).save_pretrained(directory)
    assert load(directory).config.n_layer == 1


def full_disk(*arguments):
    raise OSError(28, "No space left on device")


def interrupt(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("failure, error", [(full_disk, InputError), (interrupt, KeyboardInterrupt)])
def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(saved, monkeypatch, failure, error):
    before = contents(saved)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(os, "replace", failure)
        make_gpt(n_layer=1).save_pretrained(saved)
    assert contents(saved) == before


def test_what_a_kill_left_of_an_earlier_save_is_no_obstacle(saved):
    (saved / f"{UNFINISHED}1").mkdir()
    (saved / f"{UNFINISHED}1" / WEIGHTS).write_bytes(b"half")
    make_gpt(n_layer=1).save_pretrained(saved)
    assert load(saved).config.n_layer == 1


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    assert_refused(tmp_path / "typo", f"{CONFIG}: there is no such file", "gpt2-xl")


def test_a_fifo_is_not_waited_for(saved):
    (saved / CONFIG).unlink()
    os.mkfifo(saved / CONFIG)
    writer = os.open(saved / CONFIG, os.O_RDWR)  # or this test would hang where the command does
    assert_refused(saved, f"{CONFIG}: there is no such file")
    os.close(writer)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "empty"),
        ("{", "Expecting"),
        ("[]", "no JSON object"),
        ("[" * 300_000, "RecursionError"),
        ('{"n_head": 4, "n_head": 6}', "the key n_head is there twice"),
    ],
    ids=["empty", "cut off", "a list", "nested", "a key twice"],
)
def test_a_damaged_config_is_refused(saved, text, words):
    (saved / CONFIG).write_text(text)
    assert_refused(saved, CONFIG, words)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(model_type="llama"), "model_type 'llama', and only 'gpt2' can be loaded"),
        (dict(activation_function="gelu"), "activation_function 'gelu'"),
        (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon 1e-06"),
        (dict(n_inner=48), "n_inner 48"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True"),
        (dict(n_layer=10**9), "n_layer 1000000000, and only 3 can be loaded"),
        (dict(n_positions=25), "n_positions 25"),
        (dict(n_head=5), "n_embd 48 is not divisible by n_head 5"),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused(saved, changes, words):
    write_config(saved, **changes)
    assert_refused(saved, words)


@pytest.mark.parametrize(
    "changes",
    [dict(activation_function="gelu_pytorch_tanh"), dict(n_inner=4 * 48)],
    ids=str,
)
def test_other_words_for_what_a_gpt_computes_are_understood(saved, changes):
    write_config(saved, **changes)
    torch.testing.assert_close(load(saved).state_dict(), make_gpt().state_dict(), rtol=0, atol=0)


def test_a_config_without_a_tokenizers_name_means_gpt2s(saved):
    settings = json.loads((saved / CONFIG).read_text())
    del settings["tokenizer"]
    (saved / CONFIG).write_text(json.dumps(settings))
    assert load(saved).tokenizer == "gpt2"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"\xff" * 5000, "longer than the file"),
        (bytes(8), "Expecting value"),
        (b"\x02" + bytes(7) + b"[]", "no JSON object"),
        (b"\x02" + bytes(7) + b"{}", "no GPT-2"),
    ],
    ids=["empty", "a length beyond the file", "no header", "a list", "no tensors"],
)
def test_a_damaged_weights_file_is_refused(saved, content, words):
    (saved / WEIGHTS).write_bytes(content)
    assert_refused(saved, words)


def test_a_truncated_weights_file_is_refused(saved):
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[:-4])
    assert_refused(saved, WEIGHTS, "its tensors end at byte")


# the last two tensors of the file, 48 numbers each
GAIN, BIAS = "transformer.ln_f.weight", "transformer.ln_f.bias"


@pytest.mark.parametrize(
    "name, changes, words",
    [
        (GAIN, dict(dtype="I32"), f"{GAIN} is I32, and only F64, F32, F16, BF16"),
        (GAIN, dict(dtype="F64"), f"{GAIN} has 192 bytes, which are no F64 of shape [48]"),
        (GAIN, dict(shape=[2, 2]), f"{GAIN} has 192 bytes, which are no F32 of shape [2, 2]"),
        (BIAS, dict(data_offsets=[10**9, 10**9 + 192]), f"{BIAS} begins at byte 1000000000"),
        (BIAS, dict(data_offsets=None), "TypeError"),
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_the_numbers_is_refused(saved, name, changes, words):
    header, numbers = read_header(saved)
    header[name] |= changes
    write_header(saved, json.dumps(header), numbers)
    assert_refused(saved, WEIGHTS, words)


def test_tensors_that_share_their_numbers_are_refused(saved):
    header, numbers = read_header(saved)
    header[BIAS]["data_offsets"] = header[GAIN]["data_offsets"]
    write_header(saved, json.dumps(header), numbers[:-192])
    assert_refused(saved, WEIGHTS, "begins at byte")


def test_numbers_between_tensors_are_refused(saved):
    header, numbers = read_header(saved)
    first, last = header[BIAS]["data_offsets"]
    header[BIAS]["data_offsets"] = [first + 4, last + 4]
    write_header(saved, json.dumps(header), numbers + bytes(4))
    words = f"{BIAS} begins at byte {first + 4}, and the tensor before it ends at byte {first}"
    assert_refused(saved, WEIGHTS, words)


def test_numbers_after_the_tensors_are_refused(saved):
    with open(saved / WEIGHTS, "ab") as f:
        f.write(bytes(4))
    assert_refused(saved, WEIGHTS, "its tensors end at byte")


def test_a_tensor_named_twice_in_the_header_is_refused(saved):
    header, numbers = read_header(saved)
    entry = json.dumps({GAIN: header[BIAS]})
    twice = json.dumps(header)[:-1] + ", " + entry[1:]
    write_header(saved, twice, numbers)
    assert_refused(saved, WEIGHTS, f"the key {GAIN} is there twice")


def test_a_tensor_by_both_of_its_names_is_refused(saved):
    write_tensors(saved, {"ln_f.bias": torch.ones(48)})
    assert_refused(saved, WEIGHTS, f"{BIAS} is there twice")


def test_a_tensor_in_two_shards_is_refused(saved):
    (saved / WEIGHTS).rename(saved / "one.safetensors")
    safetensors.save_file({BIAS: torch.ones(48)}, saved / "two.safetensors")
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    (saved / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert_refused(saved, "two.safetensors", f"{BIAS} is there twice")


def test_a_shard_outside_of_the_directory_is_refused(saved):
    (saved / WEIGHTS).unlink()
    (saved / INDEX).write_text(json.dumps({"weight_map": {"a": "../shard"}}))
    assert_refused(saved, "the shard ../shard is outside of the directory")


def test_a_missing_shard_is_refused(saved):
    (saved / WEIGHTS).unlink()
    (saved / INDEX).write_text(json.dumps({"weight_map": {"a": "shard\x1b[31m"}}))
    assert_refused(saved, r"shard\x1b[31m", "there is no such file")


def test_weights_that_are_not_transposed_are_refused(saved):
    write_tensors(saved, {"transformer.h.0.mlp.c_fc.weight": torch.zeros(192, 48)})
    assert_refused(saved, "transformer.h.0.mlp.c_fc.weight", "torch.Size([48, 192])")


def test_weights_that_are_not_finite_are_refused(saved):
    write_tensors(saved, {BIAS: torch.full([48], torch.nan)})
    assert_refused(saved, f"{BIAS} holds values that are not finite")


def test_a_missing_weight_is_refused(saved):
    tensors = safetensors.load_file(saved / WEIGHTS)
    del tensors["transformer.h.1.attn.c_attn.bias"]
    safetensors.save_file(tensors, saved / WEIGHTS)
    assert_refused(saved, "Missing key", "transformer.h.1.attn.c_attn.bias")


def test_a_head_of_its_own_is_refused(saved):
    write_tensors(saved, {"lm_head.weight": torch.zeros(300, 48)})
    assert_refused(saved, "lm_head.weight differs from wte.weight")


def test_an_escape_sequence_in_a_key_does_not_reach_the_terminal(saved):
    safetensors.save_file({"\x1b]0;owned\x07\n\u202e": torch.ones(3)}, saved / WEIGHTS)
    assert_refused(saved, r"no GPT-2, its tensors are transformer.\x1b]0;owned\x07")


def test_an_escape_sequence_in_an_unknown_weight_does_not_reach_the_terminal(saved):
    write_tensors(saved, {"\x1b[31m": torch.ones(3)})
    assert_refused(saved, r"transformer.\x1b[31m")

"""What is read from the events of a step. No script runs here, and nothing is trained."""

from harness.watch.events import (
    Batch,
    Call,
    count_of,
    from_first_forward,
    loss_of,
    micro_batches_of,
    seconds_of_kinds,
    seconds_of_lines,
    spans_of,
    take_turns,
    unit_of,
)

import pytest

FOUR, EIGHT, TEXT = Batch("sample", 4, None, 4), Batch("sample", 8, None, 8), Batch("tok", 2, 8, 16)


def call(module="model", inputs="x", batch=FOUR, version=0, is_training=True):
    return ("call", Call(module, is_training, version, inputs, batch))


def backward(value=1.0, is_share=False):
    return ("loss", [(value, is_share)])


def kinds_of_spans(*kinds):
    """Of marks of these kinds, one a second."""
    return [kind for kind, *_ in spans_of([(kind, time, time) for time, kind in enumerate(kinds)])]


def test_time_counts_as_what_was_begun_last_without_that_of_the_hooks():
    step = [
        ("rest", 0, 0),
        ("forward", 2, 3),  # a hook of one second
        ("rest", 7, 7),
        ("backward", 9, 10),
        ("rest", 20, 20),
        ("rest", 25, 25),
    ]
    spent = {kind: seconds for kind, seconds in seconds_of_kinds(spans_of(step)).items() if seconds}
    assert spent == {"rest": 2 + 5, "forward": 4, "loss": 2, "backward": 10}


def test_own_code_is_a_loss_only_between_a_forward_and_a_backward():
    kinds = ["rest", "forward", "rest", "data", "rest", "backward", "rest"]
    assert kinds_of_spans(*kinds, "rest") == kinds
    closure = ["update", "forward", "update", "backward"]
    assert kinds_of_spans(*closure, "update") == ["update", "forward", "loss", "backward"]


def test_a_look_stands_for_all_own_code_since_the_look_before():
    spans = [("rest", 0, 10), ("forward", 10, 100), ("loss", 100, 110), ("backward", 110, 120), ("rest", 120, 130)]
    looks = [(4, "a"), (50, "in a forward"), (105, "b"), (125, "a")]
    lines, unseen = seconds_of_lines(spans, looks, unseen=1)
    assert lines == {"rest": {"a": 1 + 4 + 5 + 5}, "loss": {"b": 6 + 5}}
    assert unseen == 5


def test_the_first_step_begins_with_its_first_forward():
    start = [("rest", 0, 0), ("data", 1, 1), ("rest", 9, 9)]
    step = [*start, ("forward", 10, 11), ("rest", 15, 15)]
    assert spans_of(from_first_forward(step)) == [("forward", 11, 15)]
    assert from_first_forward(start) == start


@pytest.mark.parametrize(
    "step, unit, count, loss",
    [
        ([call(), backward(2.0)], "sample", 4, 2.0),
        ([call(), backward(0.5, True), call(), backward(0.25, True)], "sample", 8, 0.75),
        ([call(), backward(), call(), backward()], "sample", 8, None),  # a sum or a mean?
        ([call("encoder", batch=TEXT), call("head"), backward()], "tok", 16, 1.0),
        ([call(inputs="x"), call(inputs="y", batch=EIGHT), call(inputs="x"), backward()], "sample", 12, 1.0),
        ([call(), call(batch=EIGHT, is_training=False), backward()], "sample", 4, 1.0),  # a validation
        ([call(), backward(3.0), call(version=1), backward(9.0)], "sample", 4, 3.0),  # SAM
        ([call(), backward(), ("other", None), call("maker", batch=EIGHT), backward(5.0)], "sample", 8, 5.0),  # a GAN
        ([("other", None), call(), backward()], "sample", 4, 1.0),
        ([call(), ("scaled", [(2.0, True)]), backward(4096.0)], "sample", 4, 2.0),
        ([call()], "sample", 4, None),  # without backward()
        ([backward(7.0)], "step", 0, 7.0),  # the model is called by a compiled function
        ([call(batch=Batch()), backward(float("nan"))], "step", 0, None),
        ([], "step", 0, None),
    ],
)
def test_what_a_step_trains_on(step, unit, count, loss):
    micro_batches = micro_batches_of(step)
    assert (unit_of(micro_batches), count_of(micro_batches, unit_of(micro_batches))) == (unit, count)
    assert loss_of(micro_batches) == loss


def test_optimizers_take_turns_if_one_steps_behind_a_backward():
    assert take_turns([call(), backward(), ("other", None), call(), backward()])
    assert not take_turns([("other", None), call(), backward()])  # it has stepped after the one that ends a step

"""What is read from the events of a step. No script runs here, and nothing is trained."""

from harness.watch.events import (
    Batch,
    Call,
    Habits,
    accumulated,
    count_of,
    loss_of,
    micro_batches_of,
    seconds_of_lines,
    spans_of,
    unit_of,
)

import pytest

HALF = (0.5, "NllLossBackward0")
FOUR, EIGHT, TEXT = Batch("sample", 4, None, 4), Batch("sample", 8, None, 8), Batch("tok", 2, 8, 16)


class Model:
    """What is called. A test that keeps it weakly needs more than a name."""


def call(module="model", tensor="x", batch=FOUR, version=0, is_training=True, is_computed=False):
    return ("call", Call(module, is_training, version, tensor, batch, is_computed))


def solve(tensor, batch=FOUR, module="model"):
    """A call on what the script has computed, as an ODE solver and a decoder are called."""
    return call(module, tensor, batch, is_computed=True)


def backward(value=1.0, share=None):
    return ("loss", [(value, share)])


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
    seconds = [(kind, ended - began) for kind, began, ended in spans_of(step)]
    assert seconds == [("rest", 2), ("forward", 4), ("loss", 2), ("backward", 10), ("rest", 5)]


def test_a_hook_that_begins_a_step_was_entered_before_it():
    assert spans_of([("rest", 5, 5), ("forward", 4, 6), ("rest", 7, 7)]) == [("rest", 5, 5), ("forward", 6, 7)]


def test_own_code_is_a_loss_only_between_a_forward_and_a_backward():
    kinds = ["rest", "forward", "rest", "data", "rest", "backward", "rest"]
    assert kinds_of_spans(*kinds, "rest") == kinds
    closure = ["update", "forward", "update", "backward"]
    assert kinds_of_spans(*closure, "update") == ["update", "forward", "loss", "backward"]


def test_a_look_stands_for_all_own_code_since_the_look_before():
    spans = [("rest", 0, 10), ("forward", 10, 100), ("loss", 100, 110), ("backward", 110, 120), ("rest", 120, 130)]
    looks = [(4, "a"), (50, "in a forward"), (105, "b"), (125, "a")]
    lines, unseen = seconds_of_lines(spans, looks, unseen=1)
    assert lines == [("rest", "a", 1 + 4), ("loss", "b", 6 + 5), ("rest", "a", 5 + 5)]
    assert unseen == 5


@pytest.mark.parametrize(
    "step, unit, count, loss",
    [
        ([call(), backward(2.0)], "sample", 4, 2.0),
        ([call(), backward(0.5, HALF), call(), backward(0.25, HALF)], "sample", 8, 0.75),
        ([call(), backward(), call(), backward()], "sample", 8, None),  # a sum or a mean?
        ([call("encoder", batch=TEXT), call("head"), backward()], "tok", 16, 1.0),
        ([call(tensor="x"), call(tensor="y", batch=EIGHT), call(tensor="x"), backward()], "sample", 12, 1.0),  # x twice
        ([call(), call(batch=EIGHT, is_training=False), backward()], "sample", 4, 1.0),  # a validation
        ([call(), solve("y"), solve("z", EIGHT), backward()], "sample", 4, 1.0),  # an ODE
        ([call("table", batch=Batch()), solve("y"), solve("z", EIGHT), backward()], "sample", 8, 1.0),  # learned codes
        ([call(batch=TEXT), solve("y", TEXT), backward()], "tok", 32, 1.0),  # a text in two parts
        ([call("encoder", batch=TEXT), solve("y", TEXT, "decoder"), backward()], "tok", 32, 1.0),  # a translation
        ([call("table", batch=TEXT), solve("x", TEXT), backward()], "tok", 16, 1.0),  # the same ids
        ([call(), backward(3.0), call(version=1), backward(9.0)], "sample", 4, 3.0),  # SAM
        ([call(), backward(), ("other", None), call("maker", batch=EIGHT), backward(5.0)], "sample", 8, 5.0),  # a GAN
        ([("other", None), call(), backward()], "sample", 4, 1.0),  # it has stepped before
        ([call(), ("scaled", [(2.0, HALF)]), backward(4096.0)], "sample", 4, 2.0),  # by a GradScaler
        ([call(), ("scaled", [(2.0, None)]), ("scaled", [(1.0, None)]), backward(4096.0)], "sample", 4, None),  # a sum
        ([call(), backward(0.5, HALF), call(version=1), backward(0.2, HALF)], "sample", 4, 0.5),  # LBFGS
        ([call(), backward(0.5, HALF), call(tensor="y", version=1), backward(0.2, HALF)], "sample", 8, 0.7),  # max_norm
        ([call(), backward(0.5, HALF), call("other"), backward(0.2, HALF)], "sample", 8, None),  # two models
        ([call()], "sample", 4, None),  # without backward()
        ([backward(7.0)], "step", 0, 7.0),  # the model is called by a compiled function
        ([call(batch=Batch()), backward(float("inf"))], "step", 0, float("inf")),  # a graph, whose loss diverges
        ([], "step", 0, None),
    ],
)
def test_what_a_step_trains_on(step, unit, count, loss):
    micro_batches = micro_batches_of(step)
    assert (unit_of(micro_batches), count_of(micro_batches, unit_of(micro_batches))) == (unit, count)
    assert loss_of(micro_batches) == loss


@pytest.mark.parametrize(
    "shares, number",
    [
        (4 * [(0.25, "mse")], 4),
        (3 * [(0.25, "mse")], 3),  # the last window of an epoch
        ([(0.75, "mse"), (0.25, "mse")], 2),  # by the tokens of each
        ([(0.5, "mse"), (0.1, "mse")], 1),  # two losses with their weights
        ([(0.5, "mse"), (0.5, "nll")], 1),
        (2 * [(None, "mse")], 2),  # a factor on a card
        ([(0.5, "mse"), None], 1),
        ([None, None], 1),
    ],
)
def test_losses_are_accumulated_if_they_are_shares_of_one(shares, number):
    step = [note for tensor, share in enumerate(shares) for note in (call(tensor=tensor), backward(1.0, share))]
    assert accumulated(micro_batches_of(step)) == number


def test_losses_of_one_batch_with_their_weights_are_no_shares():
    step = [call(), backward(0.7, (0.7, "mse")), call(), backward(0.3, (0.3, "mse"))]
    assert accumulated(micro_batches_of(step)) == 1


def habits_of(*steps):
    habits = Habits()
    for notes in steps:
        habits.add(notes)
    return habits


def test_habits_are_of_all_steps():
    late = [("clipping", "value"), ("autocast", "bfloat16"), ("repeat", None), ("batch", 2), ("model", Model)]
    habits = habits_of([("batch", 0)], [("batch", 2)], late)
    assert (habits.clips, habits.autocast, habits.repeats_forward) == ("value", "bfloat16", True)
    assert [*habits.models.values()] == [Model]  # it got no tensor
    assert habits.loaders == {0: 1, 2: 2}

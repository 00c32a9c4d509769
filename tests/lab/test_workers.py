"""Virtual workers: a loss tears the model, and what the recovery of real runs makes of it, compared with arithmetic."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from everstep.lab import workers as room
from everstep.lab.lessons import Lesson
from everstep.lab.workers import Finish, Workers
from everstep.live.course import Give, GoOn, Lossy, Move, Reduce, Saying, next_move

COUNT, LOST, LATE = 4, 2, 1
LAYERS = 3


def crew(*, captures: bool = False) -> Workers:
    return Workers(Lesson("mlp", workers=COUNT, samples=4, seed=3), COUNT, captures=captures)


def until(trained: Workers, step: int, layer: int, late: Collection[int] = ()) -> None:
    """So many steps are done, and so many layers of the next; those who are late have not noticed the last one."""
    numbers = step * LAYERS + layer
    for number in range(numbers):
        trained.work(late if number == numbers - 1 else ())


def layer_of(state: Tensor, layer: int) -> Tensor:
    where = Lesson("mlp", workers=COUNT, samples=4, seed=3).layers[layer]
    return state[..., where]


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b))


def test_a_loss_leaves_layers_partly_updated_and_ranks_at_different_layers() -> None:
    trained = crew()
    until(trained, 2, 0)
    before = trained.state.clone()
    trained.work()
    trained.work(late=[LATE])
    left = trained.lose([LOST])
    now = trained.state
    assert left == [0, 1, 3]
    for rank in left:
        assert not same(layer_of(now[rank], 0), layer_of(before[rank], 0)), "updated by all"
        assert same(layer_of(now[rank], 1), layer_of(before[rank], 1)) == (rank == LATE), "by those who noticed"
        assert same(layer_of(now[rank], 2), layer_of(before[rank], 2)), "by nobody"
    assert not same(now[0], now[LATE]), "whoever went on now would train two models"
    assert bool(now[LOST].isnan().all())


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("late", [(), (LATE,), (0, 3)])
def test_going_back_ends_with_the_bits_of_an_undisturbed_training(layer: int, late: tuple[int, ...]) -> None:
    undisturbed, trained = crew(), crew(captures=True)
    until(undisturbed, 6, 0)
    until(trained, 3, layer, late)
    trained.lose([LOST])
    trained.go_back()
    assert trained.step == (2 if layer == 0 and late else 3), "the newest step that all have"
    until(trained, 6 - trained.step, 0)
    assert (trained.step, trained.digest()) == (6, undisturbed.digest())


def test_a_restart_ends_with_the_bits_of_an_undisturbed_training() -> None:
    undisturbed, trained = crew(), crew()
    until(undisturbed, 5, 0)
    until(trained, 1, 0)
    checkpoint = trained.state[0].clone()
    until(trained, 2, 2, [LATE])
    trained.lose([0, LOST])
    trained.start_again(1, checkpoint)
    until(trained, 4, 0)
    assert trained.digest() == undisturbed.digest()


def by_hand(before: Tensor, gradients: Tensor, layer: int, finish: Finish) -> Tensor:
    """Weights and momentum after the step, worked out in another way: in float64, and with means instead of shares."""
    state, gradients = before.double().clone(), gradients.double()
    left = [rank for rank in range(COUNT) if rank != LOST]
    for at in range(LAYERS):
        weights, momentum = layer_of(state, at)
        whole, partial = layer_of(gradients, at).mean(0), layer_of(gradients[left], at).mean(0)
        if at >= layer and finish is Finish.DROPPED:
            continue
        if at >= layer:
            whole = partial if finish is Finish.RESCALED else partial * len(left) / COUNT
        momentum.mul_(0.9).add_(whole)
        weights.sub_(0.02 * momentum)
    return state


@pytest.mark.parametrize("finish", list(Finish))
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("late", [(), (LATE,)])
def test_going_forward_is_what_arithmetic_by_hand_says(finish: Finish, layer: int, late: tuple[int, ...]) -> None:
    healthy, trained = crew(), crew()
    until(healthy, 3, 0)
    gradients, _ = Lesson("mlp", workers=COUNT, samples=4, seed=3).gradients(healthy.state[:, 0], 4)
    expected = by_hand(healthy.state[0], gradients, layer, finish)
    until(trained, 3, layer, late)
    lossy = trained.go_forward(trained.lose([LOST]), finish)
    assert trained.step == 4
    for rank in range(COUNT):
        torch.testing.assert_close(trained.state[rank].double(), expected, rtol=1e-5, atol=1e-7)
        assert same(trained.state[rank], trained.state[0])
    assert lossy == Lossy(buckets=LAYERS - layer, batches=0.25)
    until(healthy, 1, 0)
    assert trained.digest() != healthy.digest(), "lossy"


def test_several_are_done_without_and_counted() -> None:
    trained = crew()
    until(trained, 2, 1)
    lossy = trained.go_forward(trained.lose([0, 1, LOST]), Finish.RESCALED)
    assert lossy == Lossy(buckets=2, batches=0.75)
    until(trained, 1, 0)
    assert trained.step == 4 and not bool(trained.state.isnan().any())


def test_the_moves_are_those_of_real_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost between two steps, one of the others still in the step before: it is given, goes on, and all reduce."""
    moves: list[Move] = []

    def told(said: list[Saying]) -> Move:
        moves.append(next_move(said))
        return moves[-1]

    monkeypatch.setattr(room, "next_move", told)
    trained = crew()
    until(trained, 3, 0, [LATE])
    trained.go_forward(trained.lose([LOST]), Finish.RESCALED)
    assert [type(move) for move in moves[:2]] == [Give, GoOn]
    assert [move.number for move in moves if isinstance(move, Reduce)] == [9, 10, 11]


@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_every_model_goes_back_exactly_and_forward_alike(kind: str) -> None:
    lesson = Lesson(kind, workers=3, samples=2, seed=1)
    undisturbed, back, forward = (Workers(lesson, 3, captures=True) for _ in range(3))
    for _ in range(4 * undisturbed.layers):
        undisturbed.work()
    for trained in (back, forward):
        for _ in range(2 * trained.layers + 1):
            trained.work()
        trained.work(late=[2])
        left = trained.lose([1])
        if trained is back:
            trained.go_back()
        else:
            assert trained.go_forward(left, Finish.RESCALED).buckets == trained.layers - 2
        while trained.step < 4:
            trained.work()
    assert back.digest() == undisturbed.digest() != forward.digest()
    assert same(forward.state[0], forward.state[1]) and same(forward.state[0], forward.state[2])

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from capsnet.data.augment import Brightness, Contrast, Crop, Flip, Shift, Step
from capsnet.data.splits import ArraySplit, Batch, iterate_batches, num_steps


def numbered_split(
    count: int, steps: tuple[Step, ...] = (), *, standardised: bool = False
) -> ArraySplit:
    """Images of noise whose label is their number."""
    images = np.random.default_rng(5).integers(0, 256, (count, 2, 8, 8)).astype(np.uint8)
    return ArraySplit(
        images,
        np.arange(count),
        name="numbered",
        split="train",
        class_names=tuple(map(str, range(count))),
        steps=steps,
        standardised=standardised,
        origin="noise",
    )


AUGMENTED = (Shift(2), Crop(6), Flip(), Brightness(), Contrast())


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def test_a_batch_has_images_labels_and_targets() -> None:
    split = numbered_split(7, (Shift(1),))
    batch = split.train_batch(np.arange(5), seed=0, epoch=0)
    assert batch.images.shape == (5, 2, 8, 8)
    assert batch.labels.shape == (5, 1)
    assert batch.targets.shape == (5, 1, 2, 8, 8)
    assert_close(batch.targets[:, 0], batch.images)  # §4.1: the shifted image itself
    assert batch.images.is_contiguous()
    assert split.image_shape == (2, 8, 8)
    assert (len(split), split.num_classes, split.labels_per_image) == (7, 7, 1)


def test_an_epoch_shows_every_example_once() -> None:
    split = numbered_split(37)
    for epoch in range(3):
        batches = iterate_batches(split, seed=1, epoch=epoch, batch_size=1)
        labels = [int(batch.labels) for batch in batches]
        assert sorted(labels) == list(range(37))
        assert labels != sorted(labels)


def test_training_drops_and_evaluation_keeps_the_last_batch() -> None:
    split = numbered_split(11)
    assert num_steps(split, 4) == 2
    assert num_steps(split, 4, train=False) == 3
    sizes = [len(b.labels) for b in iterate_batches(split, batch_size=4)]
    assert sizes == [4, 4]
    evaluated = list(iterate_batches(split, batch_size=4, train=False))
    assert [len(batch.labels) for batch in evaluated] == [4, 4, 3]
    assert joined(evaluated).labels[:, 0].tolist() == list(range(11))


def test_an_epoch_continues_bit_identically_from_any_step() -> None:
    split = numbered_split(23, AUGMENTED, standardised=True)
    whole = list(iterate_batches(split, seed=3, epoch=2, batch_size=5))
    for start in range(4):
        rest = iterate_batches(split, seed=3, epoch=2, batch_size=5, start_step=start)
        for expected, batch in zip(whole[start:], rest, strict=True):
            for one, other in zip(expected, batch, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_processes_together_see_what_one_would_see(world_size: int, train: bool) -> None:
    split = numbered_split(20, AUGMENTED)
    alone = joined(list(iterate_batches(split, seed=3, epoch=1, batch_size=6, train=train)))
    shares = [
        list(
            iterate_batches(
                split,
                seed=3,
                epoch=1,
                batch_size=6,
                rank=rank,
                world_size=world_size,
                train=train,
            )
        )
        for rank in range(world_size)
    ]
    together = [share[step] for step in range(4) for share in shares if step < len(share)]
    for one, other in zip(alone, joined(together), strict=True):
        assert torch.equal(one, other)


def test_a_process_without_a_share_of_the_last_batch_skips_it() -> None:
    batches = iterate_batches(numbered_split(9), batch_size=4, rank=0, world_size=2, train=False)
    assert [batch.labels[:, 0].tolist() for batch in batches] == [[0, 1], [4, 5]]


def test_seed_and_epoch_change_order_and_augmentation() -> None:
    split = numbered_split(30, (Shift(2),))
    first = split.train_batch(np.arange(30), seed=0, epoch=0)
    for seed, epoch in ((1, 0), (0, 1)):
        other = split.train_batch(np.arange(30), seed=seed, epoch=epoch)
        assert not torch.equal(first.labels, other.labels)
        order = other.labels[:, 0].argsort()[first.labels[:, 0]]
        assert not torch.equal(first.images, other.images[order])


def test_evaluation_is_never_random() -> None:
    split = numbered_split(6, AUGMENTED)
    first = split.test_batch(np.array([4, 2]))
    assert first.labels.tolist() == [[4], [2]]
    assert torch.equal(first.images, split.test_batch(np.array([0, 4, 2])).images[1:])


def test_standardised_images_keep_targets_between_zero_and_one() -> None:
    split = numbered_split(40, AUGMENTED, standardised=True)
    batch = split.train_batch(np.arange(40), seed=0, epoch=0)
    flat = batch.images.flatten(1)
    assert_close(flat.mean(1), torch.zeros(40), atol=1e-5, rtol=0)
    assert_close(flat.std(1, correction=0), torch.ones(40), atol=1e-4, rtol=0)
    assert 0 <= batch.targets.min() < batch.targets.max() <= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 8}, "at most the 7 training examples of numbered, got 8"),
        ({"batch_size": 3, "world_size": 2}, "multiple of the 2 processes, got 3"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"batch_size": 2, "start_step": -1}, "start_step must be at least 0, got -1"),
    ],
)
def test_mistakes_are_named_before_any_batch(arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        iterate_batches(numbered_split(7), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "label", "sentence"),
    [
        (0, 0, "noise must have images to be a test set, got none"),
        (4, 200, r"labels of noise \(test\) must be 0 to 9, got 200 to 200"),
        (4, -1, r"labels of noise \(test\) must be 0 to 9, got -1 to -1"),
    ],
)
def test_images_without_a_class_are_refused(count: int, label: int, sentence: str) -> None:
    images, labels = np.zeros((count, 1, 8, 8), np.uint8), np.full(count, label)
    classes = tuple("0123456789")
    with pytest.raises(ValueError, match=sentence):
        ArraySplit(images, labels, name="noise", split="test", class_names=classes, origin="noise")


def test_a_batch_outside_the_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"indices of numbered must be in \[0, 7\), got 3 to 7"):
        numbered_split(7).test_batch(np.array([3, 7]))

import pytest

from capsnet.training.processes import Processes


def test_processes_that_found_different_things_end_and_the_first_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(found: list[object], what: object) -> None:
        found[:] = [8, 16]

    Processes().compare(8, "alone there is nothing to compare")
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(ValueError, match="they differ"):
        Processes(rank=0, world_size=2).compare(8, "they differ")
    with pytest.raises(SystemExit):
        Processes(rank=1, world_size=2).compare(16, "they differ")
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda found, what: None)
    Processes(rank=0, world_size=2).compare(8, "they differ")

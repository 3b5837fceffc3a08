import json
from pathlib import Path

import pytest
from made_up_runs import write_run

from capsnet.cli import main
from capsnet.experiments.catalogue import EXPERIMENTS
from capsnet.experiments.runs import Options


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("reproduce") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert run("reproduce", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == list(EXPERIMENTS)


def test_a_wrong_name_is_answered_by_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("reproduce", "fig33") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("capsnet: unknown experiment 'fig33'; did you mean 'fig3'?")
    assert captured.err.count("\n") == 1


def test_each_flag_reaches_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Options] = []

    def look(name: str, options: Options, say: object) -> None:
        given.append(options)
        raise ValueError("enough")

    monkeypatch.setattr("capsnet.cli.reproduce.reproduce_experiment", look)
    numbers = ("--trials", 2, "--epochs", 4, "--steps", 7, "--num-examples", 9, "--threads", 1)
    others = ("--quick", "--overwrite", "--device", "mps", "--data-dir", "d", "--weights", "w")
    places = ("--runs", "r", "--out", "o", "--no-train", "--digits", 3, "--digits", 5)
    assert run("reproduce", "fig4", *numbers, *others, *places) == 2
    assert given == [
        Options(
            trials=2,
            epochs=4,
            steps=7,
            num_examples=9,
            threads=1,
            quick=True,
            overwrite=True,
            device="mps",
            data_dir=Path("d"),
            weights=("w",),
            runs=Path("r"),
            out=Path("o"),
            train=False,
            digits=(3, 5),
        )
    ]


def test_finished_runs_become_a_result_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), "mnist", error=0.0031)
    assert run("reproduce", "table1", "--no-train") == 0
    said = capsys.readouterr().out
    assert "MNIST: CapsNet, 3 iterations, reconstruction: 0.31 % (paper: 0.25 ± 0.005 %)" in said
    assert "MNIST: CNN baseline: not run yet (paper: 0.39 %)" in said
    assert said.splitlines()[-1] == "written: results/table1.json, docs/images/table1.png"
    assert run("reproduce", "table1", "--no-train", "--json") == 0
    assert json.loads(capsys.readouterr().out)["name"] == "table1"
    assert run("report") == 0
    assert capsys.readouterr().out == "written: docs/results.md\n"
    assert (
        "![Test error on MNIST and MultiMNIST (Table 1)](images/table1.png)"
        in Path("docs/results.md").read_text()
    )


def test_a_report_into_a_readme_that_is_not_there_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--docs", tmp_path / "docs", "--readme", tmp_path / "README.md")
    assert run("report", "--results", tmp_path, *arguments) == 2
    assert "README.md: No such file or directory" in capsys.readouterr().err
    assert run("report", "--results", tmp_path / "nowhere", *arguments) == 2
    assert "nowhere must be a folder of results" in capsys.readouterr().err


def test_nothing_to_reproduce_from_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("reproduce", "table1", "--no-train", "--runs", tmp_path, "--out", tmp_path) == 2
    assert "there is no finished run of" in capsys.readouterr().err

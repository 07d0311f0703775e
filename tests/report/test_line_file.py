"""Lines of a run's files survive a full disk and a removed directory, and say so."""

import shutil

from megatron_merak.report.line_file import LineFile


def test_lines_wait_for_space(tmp_path):
    told: list[str] = []
    file = LineFile(tmp_path / "new" / "metrics.jsonl", told.append)
    file.write("one")
    with open("/dev/full", "ab", buffering=0) as full:
        kept, file._file = file._file, full
        file.write("two")
        file.write("three")
        file._file = kept
    assert (
        len(told) == 1
        and "cannot be written (No space left on device): its lines are kept" in told[0]
    )
    file.write("four")
    file.close()
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == "one\ntwo\nthree\nfour\n"
    assert len(told) == 2 and "nothing of it is lost" in told[1]


def test_lines_that_never_fit_are_counted(tmp_path):
    told: list[str] = []
    file = LineFile(tmp_path / "metrics.jsonl", told.append)
    with open("/dev/full", "ab", buffering=0) as full:
        file._file.close()
        file._file = full
        file.write("one")
        file.write("two")
        file.close()
    assert told[-1].endswith("its last lines are lost, 2 of them")


def test_a_removed_directory_is_made_anew(tmp_path):
    told: list[str] = []
    file = LineFile(tmp_path / "run" / "metrics.jsonl", told.append)
    file.write("one")
    shutil.rmtree(tmp_path / "run")
    file.write("two")
    file.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "two\n"
    assert (
        len(told) == 1
        and "was removed under the run, with the lines in it: it is made anew" in told[0]
    )

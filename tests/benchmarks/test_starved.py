"""The benchmark of a starved thread measures one thread and several, quiet and beside the process that takes a core."""

import os
import subprocess

import pytest
import starved

from tools.make_tiny_model import make_tiny_gguf


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen as Linux does")
def test_each_arm_is_measured_and_the_process_runs_only_beside(measured, tmp_path, monkeypatch):
    model, running, seen = make_tiny_gguf(tmp_path / "tiny.gguf"), [], []
    original = subprocess.Popen

    def popen(arguments, **options):
        process = original(arguments, **options)
        if arguments[1] == "-c":
            running.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(
        starved, "token_s", lambda llm, tokens: seen.append([one.poll() for one in running]) or 1e-3 * (1 + len(seen))
    )
    saved, _ = measured(starved.main, model, "--rounds", "2")
    assert {name: len(one["rounds"]) for name, one in saved["ms_a_token"].items()} == {
        f"{arm}, threads: {threads}": 2 for arm in ("quiet", "beside") for threads in (1, 2)
    }
    killed = -9
    assert seen == [[], [], [None], [None], [killed], [killed], [killed, None], [killed, None]]
    assert [one.poll() for one in running] == [killed, killed]

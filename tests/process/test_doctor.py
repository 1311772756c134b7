"""`envactors doctor` describes the machine and warns of possible problems."""

from __future__ import annotations

import copy
import json
import os
import platform

from envactors.cli import main
from envactors.cli.doctor import examine, warn

import envactors


def test_doctor_reports_versions_cores_and_start_methods(capsys, tmp_path):
    assert main(["doctor", "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["versions"]["envactors"] == envactors.__version__
    assert found["versions"]["python"].startswith(platform.python_version())
    assert found["cores"]["machine"] == os.cpu_count()
    assert found["processes"]["default"] in found["processes"]["start methods"]
    assert found["limits"]["file descriptors"]["soft"] is not None
    for topic in found:
        assert topic in shown
    assert main(["doctor", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == found.keys()


def test_doctor_warns_about_each_scarce_resource():
    found = examine()
    found["cores"] |= {"machine": 2, "usable": 2}
    found["memory"] |= {"free": 8 << 30}
    found["limits"] = {"file descriptors": {"soft": 1024, "hard": 65536}, "processes": {"soft": None, "hard": None}}
    found["processes"] |= {"memfd": True, "pidfd": True, "monitor": None}
    assert warn(found) == []
    shortages = {
        ("cores", "usable"): 1,
        ("memory", "free"): 1 << 20,
        ("limits", "file descriptors"): {"soft": 256, "hard": 256},
        ("limits", "processes"): {"soft": 100, "hard": 100},
        ("processes", "monitor"): "it is read-only",
    }
    for (topic, name), value in shortages.items():
        short = copy.deepcopy(found)
        short[topic][name] = value
        warnings = warn(short)
        assert len(warnings) == (2 if topic == "cores" else 1), (topic, name)
        assert all(warning["message"] and warning["remedy"].endswith(".") for warning in warnings)

"""Settings that only some backends have: the others refuse them and say whose they are, and drafts elsewhere do without."""

from dataclasses import replace

import pytest

from cpuspec.backends import BACKENDS, OWN_SETTINGS, check_backend, settings_on
from cpuspec.errors import BackendError
from cpuspec.settings import EngineConfig

OTHERWISE = {"device": "cuda", "dtype": "bf16", "weights": "codes", "activations": "f32", "prompt_arithmetic": "bf16"}
OTHERWISE["memory"] = "8GB"
assert OTHERWISE.keys() == OWN_SETTINGS.keys()

ALL = EngineConfig(threads=3, kv_format="f32", **OTHERWISE)


@pytest.mark.parametrize("setting", OTHERWISE)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_setting_is_refused_by_backends_that_do_not_have_it(monkeypatch: pytest.MonkeyPatch, name: str, setting: str) -> None:
    monkeypatch.setattr("cpuspec.backends.find_spec", lambda module: module)  # whatever is installed here
    _, owners = OWN_SETTINGS[setting]
    engine = EngineConfig(**{setting: OTHERWISE[setting]})
    if name in owners:
        check_backend(name, engine)
        return
    wanted = f"{setting} {OTHERWISE[setting]} is a setting of the {owners[0]}.* and this is {name}; .* --backend {owners[0]}"
    with pytest.raises(BackendError, match=wanted):
        check_backend(name, engine)


@pytest.mark.parametrize("name", BACKENDS)
def test_settings_for_another_backend_are_those_that_it_has(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("cpuspec.backends.find_spec", lambda module: module)
    there = settings_on(name, ALL)
    check_backend(name, there)
    assert replace(there, **OTHERWISE) == ALL
    for setting, (_, owners) in OWN_SETTINGS.items():
        assert getattr(there, setting) == (OTHERWISE[setting] if name in owners else "auto")

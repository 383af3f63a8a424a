"""GPU tests are about what can be fused, whatever a table says of the GPU that they run on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fuse_wherever_possible(_no_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_POLICY", "always")

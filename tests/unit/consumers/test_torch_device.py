"""Tests of GPU library names in a step's fingerprint, without a GPU."""

import pytest
import torch

from dora_pipe.consumers.learners.torch.device import capability
from dora_pipe.core.errors import ResourceError

REFUSED = (
    "cuDNN version incompatibility: PyTorch was compiled against (9, 20, 0) but found runtime "
    "version (9, 19, 0). PyTorch already comes bundled with cuDNN."
)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_capability_of_a_gpu_names_its_kind_and_its_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert capability("cuda") == f"sm_90, CUDA {torch.version.cuda}, cuDNN 92000"


def test_cudnn_of_another_torch_is_one_line_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError(REFUSED)

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    with pytest.raises(ResourceError) as caught:
        capability("cuda")
    assert caught.value.message == REFUSED.partition(". ")[0]
    assert "make gpu" in str(caught.value.hint)

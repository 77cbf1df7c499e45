import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and other tests run beside these."""
    torch.set_num_threads(1)

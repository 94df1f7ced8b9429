"""TapChannel between GPUs: the mailbox in device memory on one device, the process group on several."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.tap_streams import make_channel, make_plan, take_step

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device (torch.cuda.is_available() is False)"),
]


def find_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_rank(rank: int, world_size: int, port: int, transport: str, num_devices: int) -> None:
    """Send 100 steps through the channel, more work on the streams than the ranks wait for."""
    device = torch.device("cuda", rank % num_devices)
    torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if transport == "p2p" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    group = dist.new_group(list(range(world_size)), backend=backend)
    for num_slots in (1, None):
        plan = make_plan(world_size, 2 * world_size)
        channel = make_channel(plan, group, transport=transport, num_slots=num_slots, device=device)
        assert {link.transport for link in channel.links} == {transport}
        assert all(take_step(channel, step, device=device) for step in range(50))
        torch.cuda.synchronize()
        channel.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_cuda_ipc_on_one_device(world_size: int):
    mp.spawn(run_rank, (world_size, find_free_port(), "cuda_ipc", 1), world_size)


@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs 2 CUDA devices, here are {NUM_DEVICES}")
@pytest.mark.parametrize("transport", ["cuda_ipc", "p2p"])
def test_between_two_devices(transport: str):
    mp.spawn(run_rank, (2, find_free_port(), transport, 2), 2)

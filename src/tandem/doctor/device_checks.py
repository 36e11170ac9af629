"""What RDMA devices and GPUs mean, and what to do. Pure."""

from collections.abc import Iterator

from tandem.doctor.facts import Facts
from tandem.doctor.report import Finding, Status


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """Yield what is to be said of RDMA devices."""
    rdma = facts.rdma
    if not rdma.ports:
        yield Finding(
            area="rdma",
            name="devices",
            status="missing",
            found="none in /sys/class/infiniband",
            advice="pages go over TCP between hosts; in a container, pass the devices in "
            "(--device /dev/infiniband, or the cluster's RDMA device plugin)",
        )
        return
    for port in rdma.ports:
        is_active = port.state == "ACTIVE"
        yield Finding(
            area="rdma",
            name=f"{port.device} port {port.number}",
            status="ok" if is_active else "warning",
            found=f"{port.state}, {port.link}, {port.bytes_per_s / 1e9:g} GB/s",
            advice="" if is_active else "check the cable, the switch and the subnet manager",
        )
    closed = [name for name, is_open in rdma.verbs.items() if not is_open]
    if not rdma.verbs or closed:
        yield Finding(
            area="rdma",
            name="permissions",
            status="warning",
            found=f"no access to {', '.join(closed)}" if closed else "no /dev/infiniband/uverbs*",
            advice="let this user read and write them (group rdma, or a udev rule)"
            if closed
            else "load the verbs module (modprobe ib_uverbs), or pass the device into the container",
        )


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Yield what is to be said of GPUs, and of RDMA into their memory."""
    gpus = facts.gpus
    if not gpus.device_files:
        found = f"driver {gpus.driver}, and no /dev/nvidia*" if gpus.driver else "none"
        advice = "pass the GPUs into the container (docker: --gpus all)" if gpus.driver else ""
        status: Status = "warning" if gpus.driver else "missing"
        yield Finding(area="gpu", name="devices", status=status, found=found, advice=advice)
        return
    if not gpus.names:
        advice = (
            "check the driver with nvidia-smi"
            if gpus.torch_cuda
            else "this torch is a build for CPUs: install the one for CUDA"
        )
        yield Finding(
            area="gpu",
            name="devices",
            status="warning",
            found=f"{gpus.device_files}, and torch sees none"
            + (f": {gpus.error}" if gpus.error else ""),
            advice=advice,
        )
        return
    yield Finding(
        area="gpu",
        name="devices",
        status="ok",
        found=f"{len(gpus.names)} x {gpus.names[0]}, driver {gpus.driver}, CUDA {gpus.torch_cuda}",
    )
    if gpus.without_peer_access:
        pairs = ", ".join(f"{i}-{j}" for i, j in gpus.without_peer_access[:4])
        yield Finding(
            area="gpu",
            name="peer access",
            status="warning",
            found=f"{len(gpus.without_peer_access)} pairs cannot reach each other's memory ({pairs} …)",
            advice="copies between them go through the host: put GPUs of one NVLink or PCIe switch "
            "together, or turn PCIe access control (ACS) off",
        )
    if facts.rdma.ports:
        yield Finding(
            area="gpu",
            name="gpudirect",
            status="ok" if gpus.has_peermem else "warning",
            found="nvidia-peermem is loaded"
            if gpus.has_peermem
            else "nvidia-peermem is not loaded",
            advice=""
            if gpus.has_peermem
            else "RDMA reaches GPU memory through it (or dma-buf, with open kernel modules): "
            "modprobe nvidia-peermem",
        )

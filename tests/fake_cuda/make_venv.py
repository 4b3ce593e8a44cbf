"""Makes a virtual environment in which torch's build for CUDA runs without a GPU; the package's docstring says how.

    python tests/fake_cuda/make_venv.py FOLDER [--wheels FOLDER]
    python tests/fake_cuda/make_venv.py FOLDER --no-device

Packages other than torch come from the environment whose Python runs this script. Needs g++, nm and readelf (binutils), and half
a gigabyte from the package index, unless --wheels has what `--download` left there. With --no-device, FOLDER is an environment
into which torch was installed without what it needs: if that is torch for CUDA, it finds no device and computes on the CPU, as
its build for the CPU does, and asks for none of NVIDIA's packages any more, which are two gigabytes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections import defaultdict
from pathlib import Path

# the newest torch that the package allows, and the versions of CUDA's headers and of cuDNN that it asks for
PACKAGES = "torch==2.15.0", "nvidia-cuda-runtime==13.2.86", "nvidia-cuda-crt==13.2.86"
_CUDNN = 9, 26
RUNTIME, DRIVER = "libcudart.so.13", "libcuda.so.1"
# libraries of symbols that do not name their library as their version
_OWNERS = {
    r"cusparseLt": "libcusparseLt.so.0",
    r"curand": "libcurand.so.10",
    r"p?nccl|pncCl": "libnccl.so.2",
    r"cuFile": "libcufile.so.0",
    r"nvshmem": "libnvshmem_host.so.3",
    r"cu[A-Z]": DRIVER,
}
_NOT_SUPPORTED = 801
# functions whose result matters when torch starts
_FUNCTIONS = {
    "cudnnGetVersion": f"long cudnnGetVersion() {{ return {_CUDNN[0] * 10000 + _CUDNN[1] * 100}; }}\n",
    "cudnnGetProperty": "int cudnnGetProperty(int what, int* value) "
    f"{{ int of[] = {{{_CUDNN[0]}, {_CUDNN[1]}, 0}}; *value = of[what]; return 0; }}\n",
    # no device, and the name of that error; `runtime.cpp` has its own
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int* count) { *count = 0; return 100; }\n",
    "cudaGetErrorString": 'const char* cudaGetErrorString(int error) { return "no device"; }\n',
    "cudaGetErrorName": 'const char* cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }\n',
}
# requirements of torch for CUDA that nothing on the CPU uses
_FOR_DEVICES = re.compile(r"^Requires-Dist: (nvidia|cuda|triton)\b.*\n", re.MULTILINE)


def main() -> None:
    """Downloads, installs and builds; prints the path of the environment's Python."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the environment, or with --download of the wheels")
    parser.add_argument("--wheels", type=Path, help="folder that --download has filled; default: download now")
    parser.add_argument("--download", action="store_true", help="only download the wheels")
    parser.add_argument("--no-device", action="store_true", help="let the torch in the folder run on the CPU alone")
    arguments = parser.parse_args()
    if arguments.no_device:
        without_device(arguments.folder)
        return
    if arguments.download:
        download(arguments.folder)
        return
    wheels = arguments.wheels or download(arguments.folder / "wheels")
    python = make_environment(arguments.folder, wheels)
    print(python)


def download(folder: Path) -> Path:
    """Downloads torch for CUDA and headers of CUDA."""
    _run_pip("download", "-d", str(folder), *PACKAGES)
    return folder


def make_environment(folder: Path, wheels: Path) -> Path:
    """Makes the environment in `folder`; returns its Python."""
    venv.create(folder, with_pip=False, clear=False)
    python = folder / "bin" / "python"
    site = _packages(folder)
    _run_pip("--python", str(python), "install", *map(str, wheels.glob("*.whl")))
    # behind torch for CUDA; `addsitedir` also reads the other environment's own .pth files
    others = sysconfig.get_path("purelib")
    (site / "others.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    # torch's libraries look for NVIDIA's in this folder
    build_libraries(site / "torch" / "lib", site / "nvidia" / "cu13")
    return python


def _run_pip(*arguments: str) -> None:
    """Runs pip with the public index and these versions, whatever it is set up to prefer."""
    # settings may name an index or a folder with torch's build for the CPU, or another version
    settings = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    run = [sys.executable, "-m", "pip", *arguments, "-q", "--no-deps"]
    subprocess.run(run, env={**kept, "PIP_CONFIG_FILE": os.devnull}, check=True)


def without_device(folder: Path) -> None:
    """Lets the torch in an environment run without NVIDIA's libraries, if it is a build for CUDA."""
    site = _packages(folder)
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    needed = _FOR_DEVICES.findall(metadata.read_text())
    if not needed:
        return
    metadata.write_text(_FOR_DEVICES.sub("", metadata.read_text()))
    libraries = site / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    stubs = wanted_symbols(site / "torch" / "lib")
    _link(libraries, RUNTIME, stubs.pop(RUNTIME))
    for library, symbols in stubs.items():
        _link(libraries, library, symbols, libraries / RUNTIME)


def _packages(folder: Path) -> Path:
    """The folder of packages of an environment for this Python."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def build_libraries(torch_libraries: Path, nvidia: Path) -> None:
    """Builds the runtime and stubs for all of NVIDIA's other libraries into `nvidia`/lib, over the real runtime there."""
    folder, source = nvidia / "lib", Path(__file__).parent / "runtime.cpp"
    for file in folder.glob("libcudart*"):
        file.unlink()
    stubs = wanted_symbols(torch_libraries)
    own = folder / "runtime.o"
    compile_it = ["g++", "-O1", "-g", "-fPIC", "-std=c++17", "-I", str(nvidia / "include")]
    subprocess.run([*compile_it, "-c", str(source), "-o", str(own)], check=True)
    there = {line.split()[-1] for line in _lines("nm", "--defined-only", str(own))}
    _link(folder, RUNTIME, {(name, version) for name, version in stubs.pop(RUNTIME) if name not in there}, own)
    stubs[DRIVER] = {(name, version) for name, version in stubs[DRIVER] if name not in there}
    for library, symbols in stubs.items():
        _link(folder, library, symbols, folder / RUNTIME)
    own.unlink()


def wanted_symbols(torch_libraries: Path) -> dict[str, set[tuple[str, str]]]:
    """(name, version) of the functions that torch's libraries take from each of NVIDIA's libraries."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for library in torch_libraries.glob("lib*.so"):
        for line in _lines("readelf", "-d", str(library)):
            needed = re.search(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[^\]]+)\]", line)
            if needed:
                found[needed[1]]
        for line in _lines("nm", "-D", "--undefined-only", str(library)):
            name, _, version = line.split()[-1].partition("@")
            owners = [owner for pattern, owner in _OWNERS.items() if re.match(pattern, name)]
            if re.match(r"lib(cu|nv)", version):
                found[version].add((name, version))
            elif owners:
                found[owners[0]].add((name, version))
    return found


def _link(folder: Path, library: str, symbols: set[tuple[str, str]], beside: Path | None = None) -> None:
    """Links a library whose functions `symbols` do nothing, with another object or library if there is one."""
    code, versions = folder / "stubs.c", folder / "stubs.map"
    result = _NOT_SUPPORTED if library == RUNTIME else 0
    names = sorted({name for name, _ in symbols})
    code.write_text("".join(_FUNCTIONS.get(name, f"long {name}() {{ return {result}; }}\n") for name in names))
    by_version: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(symbols):
        by_version[version].append(name)
    named = {version: f"{version} {{ global: {'; '.join(each)}; }};\n" for version, each in by_version.items() if version}
    # all functions of the runtime itself have the version that torch asks for
    versions.write_text(f"{RUNTIME} {{ global: *; }};\n" if library == RUNTIME else "".join(named.values()))
    script = [f"-Wl,--version-script={versions}"] if versions.read_text() else []
    build = [
        "g++" if library == RUNTIME else "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-fno-builtin",
        "-Wl,--no-as-needed",
        "-x",
        "c",
        str(code),
        "-x",
        "none",
    ]
    linked = [] if beside is None else [str(beside)]
    subprocess.run([*build, *linked, "-o", str(folder / library), f"-Wl,-soname,{library}", *script], check=True)
    code.unlink()
    versions.unlink()


def _lines(*command: str) -> list[str]:
    return [line for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines() if line]


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""ROCm's own tests of the HIP API (ROCm/hip-tests) on the emulator; VALIDATION.md has the results.

  hip_tests.py fetch                      sources of the tests, HIP's headers and the device libraries, by git
  hip_tests.py build [DIRECTORY ..]       one program per source file
  hip_tests.py run [DIRECTORY ..]         each test in a process of its own; writes results.txt, and seconds and reasons beside it
  hip_tests.py compare [--update]         results.txt against hip_tests.txt, the committed list
  hip_tests.py table                      results.txt by directory, as markdown

A DIRECTORY is one of catch/unit, or catch/multiproc; without one, those of DIRECTORIES. Everything is kept in --work. Needs git and clang 20 or
newer with lld and llvm-link, and `cargo xtask hip-runtime --release` for the library. No GPU, no ROCm.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
EXPECTED = HERE / "hip_tests.txt"

# Repository, commit, and the directory that is needed of it.
SOURCES = {
    "hip-tests": ("ROCm/hip-tests", "4b92df34e7aaa89a3b059ee10804be86caf5035d", "catch"),
    "HIP": ("ROCm/HIP", "529a78c3ff1e06ff1d5e9501a31043d8c15aef19", "include"),
    "clr": ("ROCm/clr", "fe70c0d6b08eb1fa2d4e526e71b2fbceab51b09b", "hipamd/include"),
    "device-libs": ("ROCm/ROCm-Device-Libs", "677c6bda85223a9ca20578156087e387c0cbd37f", "."),
}
HIP_VERSION = (6, 3, 0)

DIRECTORIES = ["graph", "stream", "event", "errorHandling", "memory", "device", "module"]
DIRECTORIES += ["callback", "occupancy", "p2p", "streamperthread", "assertion", "context", "executionControl", "kernel"]
DIRECTORIES += ["launchBounds", "multiThread", "printf", "syncthreads", "threadfence", "warp", "multiproc"]
DIRECTORIES += ["cooperativeGrps", "vector_types", "rtc", "virtualMemoryManagement", "atomics"]
DIRECTORIES += ["channelDescriptor", "clock", "compiler", "complex", "device_memory", "dynamicLoading", "hip_specific", "synchronization"]
DIRECTORIES += ["deviceLib", "math", "g++", "gcc", "surface", "texture"]

# Random inputs for a function of `math`, whose default is 2^32.
OPTIONS = {"math": ["--accuracy-iterations", "65536"]}

# Where a device has no images, a test returns before its first check, which Catch calls a pass: a skip.
NO_IMAGES = """#include <hip_test_common.hh>
#undef CHECK_IMAGE_SUPPORT
#define CHECK_IMAGE_SUPPORT if (!HipTest::isImageSupported()) { HipTest::HIP_SKIP_TEST("no images"); return; }
"""


def run(command, **options):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace", **options)


def must(command, **options):
    done = run(command, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr[:2000]}")
    return done.stdout


def fetch(args):
    for name, (repository, commit, part) in SOURCES.items():
        target = args.work / name
        if target.exists():
            continue
        clone = args.work / f"{name}.git"
        must(["git", "init", "-q", "--bare", clone])
        must(["git", "-C", clone, "fetch", "-q", "--depth", "1", f"{args.git}/{repository}", commit])
        target.mkdir()
        archive = subprocess.run(["git", "-C", clone, "archive", commit, part], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "x", "-C", target], input=archive.stdout, check=True)
        print(f"{repository} {commit[:12]}")


def parallel(args, function, items):
    """Results in the order of items, with a line of progress."""
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for i, result in enumerate(pool.map(function, items), 1):
            if sys.stderr.isatty():
                print(f"\r{i} of {len(items)} ", end="", file=sys.stderr, flush=True)
            yield result


def prefix(args):
    """A ROCm installation as clang looks for it, and HIP's headers. Tests are compiled with these by a name of their own, as clang
    searches `include` last, after those that the system may have of another version. `include` is where hiprtc looks for them."""
    rocm = args.work / "rocm"
    bitcode = rocm / "amdgcn/bitcode"
    if not (rocm / "include").exists():
        (rocm / "include").mkdir(parents=True)
        (rocm / "include/hip").symlink_to("../headers/hip")
    if (rocm / "complete").exists():
        return rocm
    shutil.copytree(args.work / "HIP/include", rocm / "headers", dirs_exist_ok=True)
    shutil.copytree(args.work / "clr/hipamd/include", rocm / "headers", dirs_exist_ok=True)
    major, minor, patch = HIP_VERSION
    (rocm / "headers/hip/hip_version.h").write_text(
        f"#define HIP_VERSION_MAJOR {major}\n#define HIP_VERSION_MINOR {minor}\n#define HIP_VERSION_PATCH {patch}\n"
        '#define HIP_VERSION_GITHASH ""\n#define HIP_VERSION_BUILD_ID 0\n#define HIP_VERSION_BUILD_NAME ""\n'
        f"#define HIP_VERSION {major * 10**7 + minor * 10**5 + patch}\n"
        "#define __HIP_HAS_GET_PCH 0\n"
    )
    (rocm / "share/hip").mkdir(parents=True, exist_ok=True)
    (rocm / "share/hip/version").write_text(
        f"HIP_VERSION_MAJOR={major}\nHIP_VERSION_MINOR={minor}\nHIP_VERSION_PATCH={patch}\n"
    )
    bitcode.mkdir(parents=True, exist_ok=True)
    libraries = args.work / "device-libs"
    objects = args.work / "device-libs.o"
    objects.mkdir(exist_ok=True)
    clang = [args.clang, "-x", "cl", "-Xclang", "-cl-std=CL2.0", "-target", "amdgcn-amd-amdhsa", "-O2", "-w"]
    clang += ["-fvisibility=protected", "-fomit-frame-pointer", "-Xclang", "-finclude-default-header"]
    clang += ["-Xclang", "-fexperimental-strict-floating-point", "-Xclang", "-fdenormal-fp-math=dynamic"]
    clang += ["-nogpulib", "-cl-no-stdinc", "-Xclang", "-mcode-object-version=none", "-emit-llvm", "-c"]
    for part in ("irif/inc", "oclc/inc", "ockl/inc", "ocml/inc", "ocml/src"):
        clang += ["-I", libraries / part]
    sources = [p for part in ("ocml", "ockl", "oclc") for p in sorted((libraries / part / "src").glob("*.cl"))]

    def compile_one(source):
        out = objects / f"{source.parts[-3]}_{source.stem}.bc"
        if not out.exists():
            done = run(clang + [source, "-o", out])
            if done.returncode:
                return f"{source}: {first_error(done.stderr)}"
        return None

    # What a newer clang has no builtins for is left out: only tests that call it miss it.
    for failure in filter(None, parallel(args, compile_one, sources)):
        print(failure, file=sys.stderr)
    link = shutil.which(args.clang).replace("clang++", "llvm-link")
    for part in ("ocml", "ockl"):
        parts = [*objects.glob(f"{part}_*.bc"), *(libraries / part / "src").glob("*.ll")]
        # Clang 22 no longer links what says whether denormal numbers are flushed.
        parts += [objects / "oclc_daz_opt_off.bc"] if part == "ocml" else []
        must([link, "-o", bitcode / f"{part}.bc", *sorted(parts)])
    # Clang asks for this library, too, and HIP needs nothing of it.
    (objects / "opencl.cl").write_text("")
    must(clang + [objects / "opencl.cl", "-o", bitcode / "opencl.bc"])
    for option in objects.glob("oclc_*.bc"):
        shutil.copy(option, bitcode)
    (rocm / "complete").touch()
    return rocm


def first_error(text):
    return next((line for line in text.splitlines() if "error" in line), text[:200]).strip()


def flags(args, rocm):
    tests = args.work / "hip-tests/catch"
    common = ["-x", "hip", f"--offload-arch={args.arch}", f"--rocm-path={rocm}", "-mcode-object-version=5", "-O1", "-w"]
    common += ["-std=c++17", "-D__HIP_PLATFORM_AMD__"]
    # What newer compilers, and newer API headers, no longer define.
    common += ["-D__AMDGCN_WAVEFRONT_SIZE=64", "-DDEPRECATED(message)=", "-DrequestedHandleTypes=requestedHandleType"]
    common += [f'-DKERNELS_PATH="{tests}/kernels/"']
    for part in ("include", "kernels", "external/Catch2", "external/picojson"):
        common += ["-I", tests / part]
    return common + ["-I", rocm / "headers"]


def sources_of(args, name):
    catch = args.work / "hip-tests/catch"
    return catch / name if name == "multiproc" else catch / "unit" / name


def lists(directory):
    """What the directory's CMakeLists.txt builds: files with tests, files that these share, code objects as options, source and
    name, programs that tests start, as source and name, the options of single files, and compilers and files of the host."""
    text = (directory / "CMakeLists.txt").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    named = sorted({name for name in re.findall(r"[\w./]+\.(?:cc|cpp)", text)})
    objects = re.findall(r"--genco(.*?)\$\{CMAKE_CURRENT_SOURCE_DIR\}/([\w./]+)\s+-o\s+(?:\S*/)?(\w+\.\w+)", text, re.S)
    objects += [(" -S", *found) for found in re.findall(r"-S \$\{CMAKE_CURRENT_SOURCE_DIR\}/(\S+)\s+-o \S*/(\S+\.s)\s", text)]
    programs = [(source, name) for name, source in re.findall(r"add_executable\((\w+) EXCLUDE_FROM_ALL (\S+\.cc)\)", text)]
    own = re.findall(r'set_source_files_properties\((\S+\.cc) PROPERTIES COMPILE_\w+ "(-(?:D|f|m)[\w=-]+)"\)', text)
    by_gcc = re.findall(r"COMMAND (gcc|g\+\+) -c \$\{CMAKE_CURRENT_SOURCE_DIR\}/(\w+\.\w+)", text)
    apart = {source for _, source, _ in objects}
    sources = [name for name in named if (directory / name).exists() and name not in apart]
    texts = {name: (directory / name).read_text(errors="replace") for name in sources}
    tests = [s for s in sources if "TEST_CASE" in texts[s]]
    shared = [s for s in sources if s not in tests and "int main(" not in texts[s]]
    return tests, shared, objects, programs, dict(reversed(own)), by_gcc


def programs_in(args):
    """A test finds its configuration in the sources by this name."""
    return args.work / "hip-tests/build"


def build(args):
    rocm = prefix(args)
    tests = args.work / "hip-tests/catch"
    out = programs_in(args)
    common = flags(args, rocm)
    library = args.hip / "lib"
    host = out / "main"
    host.mkdir(parents=True, exist_ok=True)
    main = [host / f"{name}.o" for name in ("main", "hip_test_context", "hip_test_features")]
    for part in main:
        if not part.exists():
            must([args.clang, *common, "--offload-host-only", "-c", tests / f"hipTestMain/{part.stem}.cc", "-o", part])
    images = out / "images.hh"
    images.write_text(NO_IMAGES)
    jobs = []
    shared = {}
    special = {}
    for name in args.directories:
        directory = sources_of(args, name)
        sources, helpers, objects, programs, own, by_gcc = lists(directory)
        sources = [source for source in sources if args.containing in (directory / source).read_text(errors="replace")]
        special |= {directory / source: option for source, option in own.items()}
        (out / name).mkdir(exist_ok=True)
        # What tests read while they run.
        for part in re.findall(r"\$\{CMAKE_CURRENT_SOURCE_DIR\}/(\w+\.h|headers)$", (directory / "CMakeLists.txt").read_text(), re.M):
            copy = shutil.copytree if (directory / part).is_dir() else shutil.copy
            copy(directory / part, out / name / part, **({"dirs_exist_ok": True} if copy is shutil.copytree else {}))
        jobs += [(directory / source, out / name / pathlib.Path(source).stem, None) for source in sources]
        jobs += [(directory / source, out / name / target, options) for options, source, target in objects]
        jobs += [(directory / source, out / name / target, "main") for source, target in programs]
        targets = [out / name / (pathlib.Path(source).stem + ".o") for source in helpers]
        for source, target in zip(helpers, targets):
            if not target.exists():
                run([args.clang, *common, "-c", directory / source, "-o", target])
        for compiler, source in by_gcc:
            targets.append(out / name / (source + ".o"))
            headers = ["-I", rocm / "headers", "-D__HIP_PLATFORM_AMD__"]
            run([compiler, "-c", *headers, directory / source, "-o", targets[-1]])
        shared[directory] = [target for target in targets if target.exists()]

    def compile_one(job):
        source, target, options = job
        if target.exists() and not args.again:
            return job, None
        command = [args.clang, *common, "-I", source.parent, *filter(None, [special.get(source)])]
        if options in (None, "main"):
            tests_of = [*main, *shared[source.parent]] if options is None else []
            command += ["-include", images] if options is None else []
            command += [source, "-x", "none", *tests_of, "-fuse-ld=lld", "-L", library, "-lamdhip64", "-lpthread", "-ldl"]
            command += ["-lstdc++fs", f"-Wl,-rpath,{library}", "-o", target]
        else:
            # What refers to directories of a ROCm installation is in `common`.
            command += [*(o for o in options.split() if "$" not in o), "--offload-device-only", source, "-o", target]
        done = run(command)
        return job, first_error(done.stderr) if done.returncode else None

    failures = [(job, why) for job, why in parallel(args, compile_one, jobs) if why]
    log = [f"{source.parent.name}/{source.name}: {why}" for (source, _, _), why in failures]
    (args.work / "build.txt").write_text("".join(line + "\n" for line in log))
    print(f"{len(jobs) - len(failures)} of {len(jobs)} files compile; failures are in {args.work / 'build.txt'}")


def disabled(args):
    """The tests that AMD itself does not run on Linux, as regular expressions."""
    config = args.work / "hip-tests/catch/hipTestMain/config/config_amd_linux"
    text = must([args.clang, "-E", "-P", "-x", "c", f"-D{args.arch}", '-DGITHASH=""', config])
    names = re.findall(r'"((?:Unit|Stress|Performance|ABM|TypeQualifiers)_[^"]*)"', text)
    return [re.compile(name.replace("*", ".*")) for name in names]


def library(args):
    """The environment with the library that is tested."""
    return dict(os.environ, LD_LIBRARY_PATH=str(args.hip / "lib"))


def test_names(args, program):
    done = run([program, "--list-test-names-only"], cwd=program.parent, env=library(args))
    if "error while loading shared libraries" in done.stderr:
        sys.exit(done.stderr)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


class Run:
    """A run of one test: `pass`, `fail`, `abort`, `timeout` or `skip`, why, and the seconds of the processor and of the clock."""

    def __init__(self, args, program, test):
        environment = dict(library(args), HK_EMU_ARCH=args.devices, ROCM_PATH=str(args.work / "rocm"))
        pattern = re.sub(r"([\\,\[\]])", r"\\\1", test)
        start = time.monotonic()
        process = subprocess.Popen(
            [program, pattern, *OPTIONS.get(program.parent.name, [])], cwd=program.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )
        # The system ends a process that has had its seconds of the processor. One that waits for ever has none.
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (args.timeout, args.timeout + 5))
        backstop = threading.Timer(args.wall, os.killpg, (process.pid, signal.SIGKILL))
        backstop.start()
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        backstop.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu, self.wall = usage.ru_utime + usage.ru_stime, time.monotonic() - start
        if process.returncode == -signal.SIGXCPU or self.wall >= args.wall:
            self.status, self.why = "timeout", f"{self.cpu:.0f} s of the processor in {self.wall:.0f} s"
        else:
            self.status, self.why = outcome(process.returncode, output)


def outcome(code, output):
    if code < 0 or "fatal error condition" in output:
        return "abort", reason(output)
    if code:
        return "fail", reason(output)
    if "No tests ran" in output or "All tests passed" not in output and "test case" not in output:
        return "fail", "ran nothing"
    return ("skip", "") if "HIP_SKIP_THIS_TEST" in output else ("pass", "")


def reason(output):
    """The runtime's own complaint if there is one, else the first failed check."""
    missing = re.search(r"hk-emu-hip: (\w+ is not supported)", output)
    if missing:
        return missing.group(1)
    lines = output.splitlines()
    failed = [i for i, line in enumerate(lines) if "FAILED:" in line]
    if not failed:
        return (lines or ["no output"])[-1][:160]
    i = failed[0]
    return " ".join(line.strip() for line in [lines[i].rsplit("/", 1)[-1], *lines[i + 1 : i + 5]])[:240]


def run_tests(args):
    out = programs_in(args)
    never = disabled(args)
    jobs = []
    for name in args.directories:
        helpers = {target for _, target in lists(sources_of(args, name))[3]}
        for program in sorted((out / name).iterdir()):
            if program.suffix or program.name in helpers or not program.is_file() or not os.access(program, os.X_OK):
                continue
            jobs += [(name, program, test) for test in test_names(args, program) if args.filter in test]

    def run_one(job):
        name, program, test = job
        if any(pattern.fullmatch(test) for pattern in never):
            return job, None
        return job, Run(args, program, test)

    results, seconds = read(args.results), read(args.results.with_suffix(".seconds.txt"))
    if args.failed:
        jobs = [job for job in jobs if results.get(f"{job[0]}/{job[2]}") not in ("pass", "disabled")]
    reasons = []
    for (directory, _, test), done in parallel(args, run_one, jobs):
        name = f"{directory}/{test}"
        results[name] = done.status if done else "disabled"
        if done:
            seconds[name] = f"cpu={done.cpu:.1f},wall={done.wall:.1f}"
            if done.why:
                reasons.append(f"{name}: {done.status}: {done.why}")
    write(args.results, results)
    write(args.results.with_suffix(".seconds.txt"), seconds)
    (args.results.with_suffix(".reasons.txt")).write_text("".join(line + "\n" for line in reasons))
    print(table(results))


def read(path):
    if not path.exists():
        return {}
    lines = (line.rpartition(" ") for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {name: status for name, _, status in lines}


def write(path, results):
    path.write_text("".join(f"{name} {results[name]}\n" for name in sorted(results)))


STATUSES = ["pass", "fail", "abort", "timeout", "skip", "disabled"]


def table(results):
    counts = collections.defaultdict(collections.Counter)
    for name, status in results.items():
        counts[name.split("/")[0]][status] += 1
        counts["all"][status] += 1
    lines = ["| directory | " + " | ".join(STATUSES) + " |", "|---|" + "---:|" * len(STATUSES)]
    for name in [n for n in sorted(counts) if n != "all"] + ["all"]:
        lines.append(f"| {name} | " + " | ".join(str(counts[name][s]) for s in STATUSES) + " |")
    return "\n".join(lines)


def compare(args):
    results, expected = read(args.results), read(EXPECTED)
    if args.update:
        write(EXPECTED, {**expected, **results})
        return
    worse = [n for n, s in expected.items() if s == "pass" and results.get(n, "pass") != "pass"]
    better = [n for n, s in results.items() if s == "pass" and expected.get(n) != "pass"]
    for name in sorted(better):
        print(f"passes now: {name}")
    for name in sorted(worse):
        print(f"passed before: {name}: {results[name]}")
    print(f"{len(results)} results, {len(better)} better, {len(worse)} worse")
    if worse:
        raise SystemExit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["fetch", "build", "run", "compare", "table"])
    parser.add_argument("directories", nargs="*", metavar="DIRECTORY")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("target/hip-tests"))
    parser.add_argument("--hip", type=pathlib.Path, default=pathlib.Path("target/hip"), help="of xtask hip-runtime")
    parser.add_argument("--git", default="https://github.com", help="where the repositories are")
    parser.add_argument("--clang", default="clang++-22")
    parser.add_argument("--arch", default="gfx942")
    parser.add_argument("--devices", default="gfx942*2?threads=2", help="HK_EMU_ARCH of the tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=int, default=60, help="seconds of the processor, of all threads, for a test")
    parser.add_argument("--wall", type=float, default=600, help="seconds of the clock for a test")
    parser.add_argument("--filter", default="", help="run tests whose name contains this")
    parser.add_argument("--containing", default="", help="build files that contain this")
    parser.add_argument("--failed", action="store_true", help="run tests that did not pass according to the results")
    parser.add_argument("--results", type=pathlib.Path, help="default: results.txt in --work")
    parser.add_argument("--again", action="store_true", help="compile what is there already")
    parser.add_argument("--update", action="store_true", help="write the committed list")
    args = parser.parse_args()
    args.directories = args.directories or DIRECTORIES
    args.work.mkdir(parents=True, exist_ok=True)
    args.work, args.hip = args.work.resolve(), args.hip.resolve()
    if args.step in ("build", "run") and not (args.hip / "lib/libamdhip64.so").exists():
        # The linker would take another one.
        raise SystemExit(f"{args.hip}/lib: no libamdhip64.so; cargo xtask hip-runtime --release makes it")
    args.results = args.results or args.work / "results.txt"
    steps = {"fetch": fetch, "build": build, "run": run_tests, "compare": compare}
    if args.step == "table":
        print(table(read(args.results)))
    else:
        steps[args.step](args)


if __name__ == "__main__":
    main()

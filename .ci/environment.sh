# Sourced by .ci/run and .ci/nightly: settings, sections, and a virtual environment in .ci/venv.
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Tests start hundreds of processes: what one of them compiles the others find.
unset PYTHONDONTWRITEBYTECODE
bin=$PWD/.ci/venv/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

section() { printf '\n=== [%4ds] %s\n' "$SECONDS" "$*"; }

# make_environment EXTRAS [OPTION...]: this package, editable, with these extras and options of pip.
make_environment() {
    local candidate python= extras=$1
    shift
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    "${python:?Python 3.11 or newer was not found; set PYTHON}" -m venv .ci/venv
    # This exact version takes a CPU build where one is offered; a looser one may bring gigabytes of CUDA.
    # The build back end comes first, so that no isolated environment is needed, which could bring its own torch.
    # Nothing is compiled here: there are thousands of files, and tests import some of them.
    "$bin/pip" install --quiet --no-compile torch==2.13.0 'setuptools>=77'
    "$bin/pip" install --quiet --no-compile --no-build-isolation "$@" -e ".[$extras]" torch==2.13.0
    "$bin/python" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
}

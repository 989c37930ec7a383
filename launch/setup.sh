#!/usr/bin/env bash
# Makes .venv for this checkout. Sourced by the other scripts: source launch/setup.sh demo dev …  (extras of pyproject.toml)
#
# The dependencies (6 GB) live in one folder per lock file, shared by all checkouts; .venv is a thin environment that sees
# that folder and this checkout. Every file is checked against requirements.hashes. uv is used when it is there.
# From the environment: DYAD_VENV overrides the folder, DYAD_PYTHON the interpreter, DYAD_FAISS (cpu, gpu) what the machine
# seems to have. DYAD_TORCH_INDEX: torch and torchvision come from that index, unchecked, in the version of the lock file.
# DYAD_TORCH=installed: torch, torchvision, Triton and CUDA stay those of `python` (or DYAD_PYTHON), and only the rest is added,
# in a folder for that interpreter and its torch. DYAD_FAISS is then cpu unless given. Keep it exported: every script reads it.

export PATH # bash has one of its own when nobody gave it any, and does not pass it on

dyad_python() { # the first interpreter that we support, those that tests have run on first; with DYAD_TORCH the first of all
    local candidate needs=ensurepip candidates="python3.11 python3.13 python3.12 python3 python"
    if [ -n "${DYAD_TORCH:-}" ]; then needs=sys candidates="python python3"; fi
    for candidate in ${DYAD_PYTHON:-$candidates}; do
        if "$candidate" -c "import $needs, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "dyad needs Python 3.11, 3.12 or 3.13 with venv; none found. On Debian: apt-get install python3-venv." >&2
    echo "Elsewhere: set DYAD_PYTHON to one." >&2
    return 2
}

dyad_requirements() { # one requirement a line: the core and the extras named
    "$1" - "${@:2}" <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra]), sep="\n")
PY
}

dyad_installed() { # names torch of the interpreter $1, its folder and torchvision in one line; fails with what is wrong in one
    "$1" - <<'PY'
import re, sys
from importlib import metadata
from importlib.util import find_spec

found = {name: metadata.version(name) for name in ("torch", "torchvision") if find_spec(name)}
missing = {"torch", "torchvision"} - set(found)
if missing:
    sys.exit(f"DYAD_TORCH=installed: {sys.executable} has no {' and no '.join(sorted(missing))}. Set DYAD_PYTHON to one that has both")
for name, least in (("torch", (2, 8)), ("torchvision", (0, 23))):
    if tuple(map(int, re.findall(r"\d+", found[name])[:2])) < least:
        sys.exit(f"DYAD_TORCH=installed: {sys.executable} has {name} {found[name]}; dyad needs {'.'.join(map(str, least))} or newer")
print(find_spec("torch").origin, *found.values())
PY
}

dyad_beside() { # makes the environment $2, which sees the packages of the interpreter $1, below its own
    "$1" -m venv --without-pip "$2" || return
    "$1" -c 'import sys; print(*(f"import site; site.addsitedir({p!r})\n{p}" for p in sys.path if p.endswith("-packages")), sep="\n")' \
        >"$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dyad-installed.pth"
    "$2/bin/python" -m pip --version >/dev/null 2>&1 || "$2/bin/python" -m ensurepip >/dev/null
}

dyad_install() { # into the environment $2, made with the interpreter $1: the core and the extras named
    local install locked=requirements.hashes
    if [ -n "${DYAD_TORCH:-}" ]; then
        [ -x "$2/bin/python" ] || dyad_beside "$1" "$2" || return
        dyad_requirements "$1" "${@:3}" | grep -vE '^torch(vision)?[^a-z]' >"$2/requirements.txt" || return
        locked=$2/requirements.hashes
        awk '/^[^ ]/ { kept = !/^(torch|torchvision|triton|(nvidia|cuda)-[a-z0-9-]*)==/ } kept' requirements.hashes >"$locked"
    else
        [ -x "$2/bin/python" ] || "$1" -m venv "$2" || return
        dyad_requirements "$1" "${@:3}" >"$2/requirements.txt" || return
    fi
    if [ -z "${DYAD_TORCH:-}${PIP_NO_INDEX:-}" ] && command -v uv >/dev/null; then
        install=(uv pip install -q --compile-bytecode --python "$2/bin/python")
    else
        # containers of NVIDIA pin versions of their own in PIP_CONSTRAINT
        install=(env -u PIP_CONSTRAINT "$2/bin/python" -m pip install -q --disable-pip-version-check)
        # the pip that is locked: older ones refuse constraints with hashes
        "${install[@]}" -r <(awk '/^pip==/,!/\\$/' requirements.hashes) || return
    fi
    if [ -n "${DYAD_TORCH_INDEX:-}" ]; then
        # shellcheck disable=SC2046 # two words
        "${install[@]}" --no-deps --index-url "$DYAD_TORCH_INDEX" $(grep -oE '^torch(vision)?==[^ ]+' requirements.lock) || return
    fi
    "${install[@]}" -c "$locked" --build-constraint requirements.hashes -r "$2/requirements.txt"
}

dyad_link() { # the script $1 of the dependencies into .venv/bin; it then starts the Python there instead of $2
    if head -c 200 "$1" | head -n 1 | LC_ALL=C grep -qE '^#!.*(python|/bin/sh)'; then
        sed "1,3s|$2[0-9.]*|$PWD/.venv/bin/python|" "$1" >".venv/bin/${1##*/}" && chmod +x ".venv/bin/${1##*/}"
    else
        ln -s "$1" .venv/bin/ 2>/dev/null
    fi
}

dyad_setup() {
    local python tag installed='' shared extras faiss=cpu stamps site script
    PATH=${PATH//"$PWD/.venv/bin:"/} # not the environment that is made here
    python=$(dyad_python) || return
    case ${DYAD_TORCH:-} in
        '') ;;
        installed) installed=$(dyad_installed "$python") || return ;;
        *) echo "DYAD_TORCH=$DYAD_TORCH: installed is the only value" >&2 && return 2 ;;
    esac
    if [ -z "$installed" ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then faiss=gpu; fi
    extras=("${DYAD_FAISS:-$faiss}" "$@")
    tag=$("$python" -c 'import hashlib, sys; v = sys.version_info
print(hashlib.sha256(open("requirements.lock", "rb").read()).hexdigest()[:12], f"py{v[0]}{v[1]}", sep="-")')
    if [ -n "$installed" ]; then tag+=-torch$(cksum <<<"$installed" | cut -d' ' -f1); fi
    shared=${DYAD_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/dyad/$tag}
    stamps=("${extras[@]/#/$shared/.has-}") # one for each extra that is in it
    if ! ls "${stamps[@]}" >/dev/null 2>&1; then
        echo "Installing the dependencies into $shared (once per lock file; minutes) …" >&2
        dyad_install "$python" "$shared" "${extras[@]}" || return
        touch "${stamps[@]}"
    fi
    if [ "$(cat .venv/.dyad 2>/dev/null)" != "$PWD $shared" ]; then
        rm -rf .venv
        "$shared/bin/python" -m venv --without-pip .venv || return
        site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        # the plain line is for tools that only read paths; the other runs the .pth files of the dependencies. The collector
        # is a fifth of the imports of torch and transformers: commands set its threshold, torchrun and scripts do not
        "$shared/bin/python" -c 'import sysconfig; p = sysconfig.get_path("purelib")
print(f"import gc, site; gc.set_threshold(100_000, 20, 10); site.addsitedir({p!r})", p, sep="\n")' >"$site/dyad-dependencies.pth"
        echo "$PWD" >"$site/dyad-checkout.pth"
        printf '%s\n' "#!$PWD/.venv/bin/python" 'from dyad.__main__ import script' 'script()' >.venv/bin/dyad
        chmod +x .venv/bin/dyad
        echo "$PWD $shared" >.venv/.dyad
    fi
    for script in "$shared"/bin/*; do # each time: an extra may have come, and a run of this checkout may be under way
        case ${script##*/} in python* | pip* | [Aa]ctivate*) continue ;; esac
        [ -e ".venv/bin/${script##*/}" ] || dyad_link "$script" "$shared/bin/python" || true
    done
}

dyad_root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return
(cd "$dyad_root" && dyad_setup "$@") || return # in a shell of its own: the caller's stays in its folder
export PATH="$dyad_root/.venv/bin:$PATH" VIRTUAL_ENV="$dyad_root/.venv"

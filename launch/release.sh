#!/usr/bin/env bash
# Builds the sdist and the wheel of the last commit into dist/, and tries the wheel in an environment of its own:
#   bash launch/release.sh
# It uploads nothing. Before it: the version in pyproject.toml, its section in CHANGELOG.md, and bash launch/test.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh demo dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist "$work/source"
git archive HEAD | tar -x -C "$work/source"
pip=(python -m pip -q --disable-pip-version-check)
(cd "$work/source" && python -c 'from setuptools.build_meta import build_sdist; build_sdist("../built")' >/dev/null)
"${pip[@]}" wheel --no-deps --no-build-isolation -w "$work/built" "$work"/built/dyad-*.tar.gz
python -m venv --without-pip "$work/environment"
"${pip[@]}" --python "$work/environment/bin/python" install --no-deps --no-index "$work"/built/dyad-*.whl
site=$("$work/environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python -c 'import omegaconf, pathlib; print(pathlib.Path(omegaconf.__file__).parents[1])' >"$site/dependencies.pth"
(cd "$work" && "$work/environment/bin/dyad" train experiment=topics data.train=x --cfg job >/dev/null)
cp "$work"/built/dyad-* dist/
(cd dist && sha256sum dyad-*)

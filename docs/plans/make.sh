#!/bin/sh
# Plans of the full models, one after the other: text, JSON and a picture of each beside this file. Needs the `tpu` extra
# or the `dev` one, and no TPU. `sh docs/plans/make.sh v5p` makes those whose names begin so.
set -eu
cd "$(dirname "$0")"
only=${1:-}

plan() {
    name=$1
    shift
    case $name in "$only"*) ;; *) return 0 ;; esac
    # The status is 1 for programs that don't fit, which are reported too, and for mistakes, which leave no JSON.
    if python -m kimi_jax.cli plan "$@" --json "$name.json.new" --svg "$name.svg.new" >"$name.txt.new" ||
        [ -s "$name.json.new" ]; then
        for kind in json svg txt; do mv "$name.$kind.new" "$name.$kind"; done
    else
        rm -f "$name.txt.new"
        exit 1
    fi
}

plan v5p-8x8x8-kimi-k31-pro kimi-k31-pro --topology v5p:8x8x8 --prefill-tokens 1048576 --decode-slots 64 --context 131072
plan tpu7x-4x4x4-kimi-k31-pro kimi-k31-pro --topology tpu7x:4x4x4 --prefill-tokens 1048576 \
    --prefill-pieces 2 --decode-slots 64 --context 32768
plan v6e-2x2-kimi-linear-48b kimi-linear-48b-a3b --topology v6e:2x2 --prefill-tokens 8192 --decode-slots 16 --context 32768
plan v5e-4x4-kimi-linear-48b kimi-linear-48b-a3b --topology v5e:4x4 --prefill-tokens 32768 --decode-slots 16 --context 32768
plan v5p-2x2x4-kimi-linear-48b-train kimi-linear-48b-a3b --topology v5p:2x2x4 --train-rows 64 --train-tokens 4096

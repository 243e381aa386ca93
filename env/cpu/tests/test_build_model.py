"""The tiny model is the same bytes every time, and a directory that is not that model is noticed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

CPU = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CPU))

import build_model  # noqa: E402


def needs(*modules: str):
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    return unittest.skipIf(missing, f"needs {', '.join(missing)} (env/cpu/requirements.lock has them)")


class Case(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = Path(temporary.name)
        self.out = self.root / "model"

    def run_it(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = build_model.main(list(arguments))
            except SystemExit as stop:
                status = int(stop.code or 0)
        return status, out.getvalue(), err.getvalue()

    def pin_elsewhere(self, digests: dict[str, str]) -> Path:
        pinned = self.root / "digests.json"
        pinned.write_text(json.dumps(digests))
        patch = mock.patch.object(build_model, "PINNED", pinned)
        patch.start()
        self.addCleanup(patch.stop)
        return pinned


class Tokenizer(unittest.TestCase):
    def setUp(self) -> None:
        self.document, self.words = build_model.tokenizer()
        self.vocabulary = {i: text for text, i in self.document["model"]["vocab"].items()}

    def test_ids_are_dense_and_the_specials_come_first(self) -> None:
        self.assertEqual(sorted(self.vocabulary), list(range(build_model.VOCAB_SIZE)))
        self.assertEqual([self.vocabulary[i] for i in range(3)], list(build_model.SPECIAL_TOKENS))
        self.assertEqual(self.vocabulary[build_model.EOS_ID], "<|im_end|>")

    def test_every_part_of_a_merge_is_a_token_made_earlier(self) -> None:
        ids = self.document["model"]["vocab"]
        for left, right in self.document["model"]["merges"]:
            self.assertLess(max(ids[left], ids[right]), ids[left + right])

    @needs("tokenizers")
    def test_each_word_is_one_token_and_any_text_comes_back(self) -> None:
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(self.document))
        text = "".join(library.decode([i]) for i in self.words)
        self.assertRegex(text, r"\A( [a-z]{4})+\Z")
        self.assertEqual(library.encode(text).ids, list(self.words))
        for other in ("Hello, world!  12\n", "na\u00efve \u4e16\u754c \U0001f600", " batozeki bat", "\x00\x7f"):
            self.assertEqual(library.decode(library.encode(other).ids), other)
        self.assertEqual(library.encode("<|im_start|>").ids, [1])


@needs("numpy")
class Weights(Case):
    def test_a_tensor_depends_on_its_name_alone(self) -> None:
        import numpy as np

        one = build_model.random_tensor("a", (8, 16), 0.08)
        self.assertTrue(np.array_equal(one, build_model.random_tensor("a", (8, 16), 0.08)))
        self.assertFalse(np.array_equal(one, build_model.random_tensor("b", (8, 16), 0.08)))
        many = build_model.random_tensor("a", (1000, 1000), 0.08)
        self.assertAlmostEqual(float(many.mean()), 0.0, places=3)
        self.assertAlmostEqual(float(many.std()), 0.08, places=3)

    def test_bfloat16_is_rounded_to_nearest_and_ties_to_even(self) -> None:
        import numpy as np

        values = np.array([1.0, -2.5, 0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], dtype=np.float32)
        found = np.frombuffer(build_model.encode_tensor(values, "bfloat16"), dtype="<u2")
        # 1 + 2^-8 lies halfway between 0x3f80 and 0x3f81: to the even one; 1 + 3 * 2^-8 between 0x3f81 and 0x3f82.
        self.assertEqual([hex(v) for v in found], ["0x3f80", "0xc020", "0x0", "0x3f80", "0x3f82", "0x3f81"])

    @needs("safetensors")
    def test_the_file_is_readable_and_only_words_can_be_generated(self) -> None:
        from safetensors.numpy import load_file

        self.assertEqual(self.run_it(str(self.out))[0], 0)
        tensors = load_file(self.out / "model.safetensors")
        _, words = build_model.tokenizer()
        head = tensors["lm_head.weight"]
        self.assertEqual(head.shape, (4096, 256))
        self.assertEqual(set(abs(head).sum(axis=1).nonzero()[0]), set(words))
        self.assertEqual(sum(t.size for t in tensors.values()), 4459264)


@needs("numpy")
class Building(Case):
    def test_the_same_digest_every_time_and_the_pinned_one(self) -> None:
        pinned = json.loads((CPU / "model-digests.json").read_text())
        for kind in build_model.KINDS:
            for dtype in build_model.DTYPES:
                arguments = ("--kind", kind, "--dtype", dtype)
                status, first, _ = self.run_it(str(self.root / f"one-{kind}-{dtype}"), *arguments)
                _, second, _ = self.run_it(str(self.root / f"two-{kind}-{dtype}"), *arguments)
                self.assertEqual((status, first), (0, pinned[f"{kind}/{dtype}"] + "\n"))
                self.assertEqual(first, second)
        self.assertEqual(sorted(p.name for p in self.root.iterdir() if p.name.startswith(".")), [])

    def test_the_manifest_lists_every_file(self) -> None:
        _, digest, _ = self.run_it(str(self.out))
        manifest = json.loads((self.out / "model.json").read_text())
        self.assertEqual([manifest[k] for k in ("kind", "dtype", "digest")], ["dense", "float32", digest.strip()])
        self.assertEqual({*manifest["files"], "model.json"}, {p.name for p in self.out.iterdir()})

    def test_a_build_that_differs_names_both_digests_and_leaves_nothing(self) -> None:
        self.pin_elsewhere({"dense/float32": "0" * 64})
        status, out, err = self.run_it(str(self.out))
        self.assertEqual((status, out), (1, ""))
        self.assertIn("expected digest " + "0" * 64 + ", found ", err)
        self.assertEqual([p.name for p in self.root.iterdir()], ["digests.json"])

    def test_a_build_without_a_pinned_digest_is_refused_until_it_is_pinned(self) -> None:
        pinned = self.pin_elsewhere({"other/float32": "1"})
        self.assertEqual(self.run_it(str(self.out))[0], 1)
        status, digest, _ = self.run_it(str(self.out), "--pin")
        self.assertEqual(status, 0)
        self.assertEqual(json.loads(pinned.read_text()), {"dense/float32": digest.strip(), "other/float32": "1"})
        self.assertEqual(self.run_it("--verify", str(self.out))[0], 0)

    def test_a_whole_model_is_kept_and_a_damaged_one_is_built_again(self) -> None:
        _, digest, _ = self.run_it(str(self.out))
        before = (self.out / "config.json").stat()
        self.assertEqual(self.run_it(str(self.out)), (0, digest, ""))
        self.assertEqual((self.out / "config.json").stat().st_ino, before.st_ino)
        (self.out / "config.json").write_text("{}")
        status, again, err = self.run_it(str(self.out))
        self.assertEqual((status, again), (0, digest))
        self.assertIn("config.json", err)
        self.assertEqual(self.run_it("--verify", str(self.out))[0], 0)

    def test_another_dtype_replaces_the_model(self) -> None:
        self.run_it(str(self.out))
        _, digest, _ = self.run_it(str(self.out), "--dtype", "bfloat16")
        self.assertEqual(self.run_it("--verify", str(self.out)), (0, digest, ""))

    def test_a_directory_of_somebody_else_is_not_touched(self) -> None:
        self.out.mkdir()
        (self.out / "thesis.txt").write_text("mine")
        status, _, err = self.run_it(str(self.out))
        self.assertEqual(status, 1)
        self.assertIn("Not touched", err)
        self.assertEqual([p.name for p in self.out.iterdir()], ["thesis.txt"])

    def test_of_two_builds_at_once_the_first_ones_model_stays(self) -> None:
        winners: list[int] = []

        def overtaken(dtype: str) -> dict[str, bytes]:
            with mock.patch.dict(build_model.KINDS, dense=build_model.dense):
                build_model.build(self.out, "dense", dtype)
            winners.append((self.out / "config.json").stat().st_ino)
            return build_model.dense(dtype)

        with mock.patch.dict(build_model.KINDS, dense=overtaken):
            self.assertEqual(self.run_it(str(self.out))[0], 0)
        self.assertEqual([(self.out / "config.json").stat().st_ino], winners)
        self.assertEqual(self.run_it("--verify", str(self.out))[0], 0)


@needs("numpy")
class Verifying(Case):
    def setUp(self) -> None:
        super().setUp()
        self.run_it(str(self.out))

    def assert_refused(self, words: str) -> None:
        status, out, err = self.run_it("--verify", str(self.out))
        self.assertEqual((status, out), (1, ""))
        self.assertIn(words, err)
        self.assertIn("expected", err)
        self.assertIn("found", err)

    def test_a_truncated_file(self) -> None:
        with open(self.out / "model.safetensors", "r+b") as file:
            file.truncate(1000000)
        self.assert_refused("model.safetensors")

    def test_one_changed_byte(self) -> None:
        with open(self.out / "model.safetensors", "r+b") as file:
            file.seek(9000000)
            byte = file.read(1)[0]
            file.seek(9000000)
            file.write(bytes([byte ^ 1]))
        self.assert_refused("model.safetensors")

    def test_a_missing_file(self) -> None:
        (self.out / "tokenizer.json").unlink()
        self.assert_refused("tokenizer.json")

    def test_a_file_more(self) -> None:
        (self.out / "adapter_config.json").write_text("{}")
        self.assert_refused("adapter_config.json")

    def test_an_edited_file_with_the_manifest_made_to_match(self) -> None:
        (self.out / "config.json").write_text("{}")
        manifest = json.loads((self.out / "model.json").read_text())
        manifest["files"]["config.json"] = build_model.sha256(b"{}")
        (self.out / "model.json").write_text(json.dumps(manifest))
        self.assert_refused("model.json")
        manifest["digest"] = build_model.combined_digest(manifest["files"])
        (self.out / "model.json").write_text(json.dumps(manifest))
        self.assert_refused("dense/float32: expected digest")

    def test_a_manifest_that_is_none(self) -> None:
        for text in ("", "[]", "{}", '{"schema": 1}'):
            (self.out / "model.json").write_text(text)
            self.assert_refused("model.json")
        (self.out / "model.json").unlink()
        self.assert_refused("model.json")


class CommandLine(Case):
    def test_wrong_usage(self) -> None:
        for arguments in ([], [str(self.out), "--verify", str(self.out)], [str(self.out), "--kind", "unknown"]):
            self.assertEqual(self.run_it(*arguments)[0], 2, arguments)


if __name__ == "__main__":
    unittest.main()

"""What packed training does on GPUs: speed of the reference recipe, exactness, quality.

    python benchmarks/packed_gpu.py OUT WORK measure|quality [--gpus 4] [--config tiny ...]

`measure` prepares the token cache (this machine's Python packages and C headers), then runs the
reference command line and its single twin, two processes and a killed and resumed one in
deterministic mode, and the tuning runs at 5 targets per parameter. `quality` trains the best
settings of each kind at 20 targets per parameter with three seeds, compares the modes with time by
term and with the price of exactness, and runs the GPU tests. One process runs on each GPU at a
time. WORK keeps caches and runs for `quality`; OUT gets results.json and, in runs.tar.gz, the
metrics and output of every run.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

SEEDS = (0, 1, 2)
T_95_OF_3 = 4.302652729749462
"""Two-sided 95% quantile of Student's t with 2 degrees of freedom."""


@dataclass
class Job:
    """One process on one GPU: `python -m atoll ARGUMENTS`, or another command."""

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    after: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("phase", choices=("measure", "quality"))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=None, help="parts of jobs' names")
    parser.add_argument("--base", nargs="*", default=["20m"], help="recipes of one model")
    parser.add_argument("--packed", nargs="*", default=["packed8-20m-awc"])
    parser.add_argument("--ratios", nargs=3, type=float, default=(14, 5, 20))
    parser.add_argument("--tuned", type=Path, help="results.json of a study with the tuning runs")
    parser.add_argument("--stdlib", action="store_true", help="a small corpus, to try this script")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    study = Study(options)
    jobs = study.measurements() if options.phase == "measure" else study.finals()
    if options.only is not None:
        jobs = [job for job in jobs if any(part in job.name for part in options.only)]
    study.run(jobs)


class Study:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        self.corpus = self.work / "corpus.yaml"
        self.log: list[dict] = []
        self.tuned = json.loads(options.tuned.read_text())["runs"] if options.tuned else {}
        packages = sysconfig.get_path("purelib")
        headers = [
            f"{root}/**/*.{end}" for root in ("/usr", packages) for end in ("h", "hpp", "cuh")
        ]
        sources = ["stdlib"] if options.stdlib else ["site-packages", *headers]
        lines = [
            "data:",
            f"  cache_dir: {self.work / 'caches'}",
            "  passes: 4",
            "  source:",
            *(f"    - path: {json.dumps(path)}" for path in sources),
            "training: {checkpoint_policy: none, log_every: 100}",
            "evaluation: {batch_size: 64}",
        ]
        self.corpus.write_text("\n".join(lines) + "\n")

    def train(self, name: str, *settings: str, packed: int = 0, **more) -> Job:
        arguments = ["train"]
        for recipe in self.options.base + (self.options.packed if packed else []):
            arguments += ["--config", recipe]
        arguments += ["--config", str(self.corpus)]
        if packed:
            rows = self.rows() // packed
            settings = (f"strategy.models={packed}", f"training.micro_batch_size={rows}", *settings)
        settings = (f"runtime.output_dir={self.work / name}", *settings)
        for setting in settings:
            arguments += ["--set", setting]
        return Job(name, arguments, **more)

    def rows(self) -> int:
        found = self.show("training")["batch_tokens"], self.show("model")["context_length"]
        return found[0] // found[1]

    def show(self, section: str) -> dict:
        if not hasattr(self, "_shown"):
            command = [sys.executable, "-m", "atoll", "config", "show", "--json"]
            for recipe in self.options.base:
                command += ["--config", recipe]
            self._shown = json.loads(
                subprocess.run(command, capture_output=True, check=True).stdout
            )
        return self._shown["config"][section]

    def measurements(self) -> list[Job]:
        long, short, _ = self.options.ratios
        whole = [f"training.{key}={long}" for key in BUDGET]
        tune = [f"training.{key}={short}" for key in BUDGET]
        exact = [
            f"training.tokens_per_parameters={0.3212 * long / 14}",
            f"training.epoch_tokens_per_parameters={0.1606 * long / 14}",
            "training.checkpoint_policy=interval",
            "training.checkpoint_epochs=1",
            "training.log_every=10",
            "runtime.deterministic=true",
        ]
        jobs = [
            self.train("reference-packed8", *whole, packed=8),
            self.train("reference-single", *whole),
            self.train("exact-1", *exact, packed=8),
            self.train("exact-2", *exact, packed=8),
            self.train(
                "exact-killed",
                *exact,
                packed=8,
                environment={"ATOLL_FAILPOINTS": "train.after_update:40=kill"},
            ),
            Job(
                "exact-resumed",
                ["train", "--resume", str(self.work / "exact-killed")],
                after="exact-killed",
            ),
        ]
        return jobs + [
            self.train(f"tune-{name}", *tune, *settings, packed=models)
            for name, models, settings in TUNING
        ]

    def finals(self) -> list[Job]:
        """Return the runs of the best settings, then what is measured beside them."""
        jobs = []
        for seed in SEEDS:
            kinds = ["single", "packed4", "packed8"] + (["packed8-other"] if seed == 0 else [])
            jobs += [self.final(kind, seed) for kind in kinds]
        recipes = [x for r in self.options.base + self.options.packed for x in ("--config", r)]
        bench = ["bench", "throughput", *recipes, "--updates", "10"]
        return [
            *jobs,
            Job("bench-modes", [*bench, *MODES]),
            Job("bench-exact", [*bench, "--windows", "6", "--deterministic", "both"]),
            Job("gpu-tests", ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests"]),
        ]

    def final(self, kind: str, seed: int) -> Job:
        _, _, full = self.options.ratios
        _, models, settings = self.best(kind)
        return self.train(
            f"final-{kind}-seed{seed}",
            f"training.tokens_per_parameters={full}",
            f"training.epoch_tokens_per_parameters={full / 4}",
            f"runtime.seed={seed}",
            f"data.shuffle_seed={seed}",
            f"data.cache_path={self.cache()}",
            *settings,
            packed=models,
        )

    def cache(self) -> Path:
        """The one cache: seeds change the order of sequences, and not what was prepared."""
        (found,) = [p.parent for p in (self.work / "caches").glob("*/manifest.json")]
        return found

    def best(self, kind: str) -> tuple[str, int, tuple[str, ...]]:
        """Return the tuned settings of one kind with the lowest held-out loss."""
        other = "other" in kind
        own = [x for x in TUNING if x[0].startswith(kind) and ("other" in x[0]) == other]
        return min(own, key=lambda entry: self.loss(f"tune-{entry[0]}"))

    def loss(self, name: str) -> float:
        result = self.result(name) or self.tuned.get(name) or {}
        return result.get("validation_loss_nats_per_token") or math.inf

    def result(self, name: str) -> dict | None:
        path = self.work / name / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def run(self, jobs: list[Job]) -> None:
        """Carry jobs out in order, each on the first GPU that is free."""
        if not any((self.work / "caches").glob("*/manifest.json")):
            self.carry_out(self.prepare(), gpu=None)
        done: set[str] = set()
        waiting, lock = list(jobs), threading.Condition()

        def serve(gpu: int) -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    ready = [job for job in waiting if job.after is None or job.after in done]
                    if not ready:
                        lock.wait()
                        continue
                    waiting.remove(ready[0])
                self.carry_out(ready[0], gpu=gpu)
                with lock:
                    done.add(ready[0].name)
                    self.write()  # after each: whoever ends this early keeps what it has found
                    lock.notify_all()

        threads = [threading.Thread(target=serve, args=(gpu,)) for gpu in range(self.options.gpus)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def prepare(self) -> Job:
        recipes = [word for r in self.options.base for word in ("--config", r)]
        return Job("prepare", ["prepare", *recipes, "--config", str(self.corpus)])

    def carry_out(self, job: Job, *, gpu: int | None) -> None:
        logs = self.work / "logs"
        logs.mkdir(exist_ok=True)
        own = [] if job.arguments[:1] == ["-m"] else ["-m", "atoll"]
        environment = os.environ | job.environment
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        started = time.time()
        with open(logs / f"{job.name}.out", "w") as out, open(logs / f"{job.name}.err", "w") as err:
            code = subprocess.run(
                [sys.executable, *own, *job.arguments], stdout=out, stderr=err, env=environment
            ).returncode
        entry = {
            "job": job.name,
            "gpu": gpu,
            "exit": code,
            "seconds": round(time.time() - started, 1),
        }
        self.log.append(entry)
        result = self.result(job.name.replace("resumed", "killed")) or {}
        shown = {
            key: result.get(key) for key in ("validation_loss_nats_per_token", "tokens_per_second")
        }
        print(json.dumps(entry | shown), flush=True)

    def write(self) -> None:
        """Write what all phases so far have found."""
        out: Path = self.options.out
        document = {"log": self.log, "runs": {}, "rates": {}, "quality": self.quality()}
        names = sorted(path.parent.name for path in self.work.glob("*/result.json"))
        for name in names:
            result = self.result(name)
            assert result is not None
            document["runs"][name] = {key: result.get(key) for key in RESULT_KEYS}
            if name.startswith("reference"):
                document["rates"][name] = self.rate(name)
        (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
        with tarfile.open(out / "runs.tar.gz", "w:gz") as archive:
            archive.add(self.work / "logs", "logs")
            archive.add(self.corpus, "corpus.yaml")
            for name in names:
                for file in ("result.json", "metrics.jsonl", "resolved.yaml", "environment.json"):
                    if (self.work / name / file).exists():
                        archive.add(self.work / name / file, f"{name}/{file}")

    def rate(self, name: str) -> dict[str, float]:
        """Return the rate over updates 101 to 2100, and its extremes over windows of 100."""
        lines = [json.loads(line) for line in (self.work / name / "metrics.jsonl").open()]
        windows = [x for x in lines if x["event"] == "train" and 100 < x["step"] <= 2100]
        if not windows:
            return {}
        batch = self.show("training")["batch_tokens"]
        targets, seconds = (
            sum(w["updates"] for w in windows) * batch,
            sum(w["seconds"] for w in windows),
        )
        rates = [w["targets_per_second"] for w in windows]
        return {
            "targets_per_second": targets / seconds,
            "updates": sum(w["updates"] for w in windows),
            "least": min(rates),
            "most": max(rates),
        }

    def quality(self) -> dict[str, dict[str, object]]:
        """Return paired differences to one model in nats per token, with 95% intervals."""
        found: dict[str, dict[str, object]] = {}
        for kind in ("packed4", "packed8"):
            losses = [
                (self.loss(f"final-{kind}-seed{seed}"), self.loss(f"final-single-seed{seed}"))
                for seed in SEEDS
            ]
            differences = [a - b for a, b in losses]
            if not all(map(math.isfinite, differences)):
                continue
            mean, spread = statistics.mean(differences), statistics.stdev(differences)
            half = T_95_OF_3 * spread / math.sqrt(len(differences))
            found[kind] = {
                "settings": self.best(kind),
                "single": self.best("single"),
                "differences": differences,
                "mean": mean,
                "interval": [mean - half, mean + half],
            }
        return found


BUDGET = ("tokens_per_parameters", "epoch_tokens_per_parameters")
MODES = ["--mode", "single", "--mode", "packed", "--mode", "sequential"]
RESULT_KEYS = (
    "status",
    "steps",
    "tokens_per_second",
    "validation_loss_nats_per_token",
    "validation_bits_per_byte",
    "train_loss_nats_per_token",
    "parameter_digest",
    "state_digests",
    "peak_memory_bytes",
    "strategy",
    "cache_identity",
    "source_hash",
)
SLOW = ("optimizer.beta1=0.95", "optimizer.beta2=0.999")
FAST = ("optimizer.beta1=0.9", "optimizer.beta2=0.98")
FREE = ("optimizer.grad_clip=null",)
COMPLETE = ("strategy.topology=complete",)
TUNING: list[tuple[str, int, tuple[str, ...]]] = [
    ("single-56", 0, ("optimizer.lr=0.0056",)),
    ("single-40", 0, ("optimizer.lr=0.004",)),
    ("single-80", 0, ("optimizer.lr=0.008",)),
    ("packed8-56-slow", 8, ("optimizer.lr=0.0056", *SLOW)),
    ("packed8-56-fast", 8, ("optimizer.lr=0.0056", *FAST)),
    ("packed8-80-slow", 8, ("optimizer.lr=0.008", *SLOW)),
    ("packed8-40-fast", 8, ("optimizer.lr=0.004", *FAST)),
    ("packed8-other-atc", 8, ("optimizer.lr=0.0056", *SLOW, "strategy.scheme=atc")),
    ("packed8-other-complete", 8, ("optimizer.lr=0.0056", *SLOW, "strategy.topology=complete")),
    ("packed8-other-adaptive", 8, ("optimizer.lr=0.0056", *SLOW, "strategy.consensus_power=1")),
    ("single-28", 0, ("optimizer.lr=0.0028",)),
    ("single-20", 0, ("optimizer.lr=0.002",)),
    ("packed8-28-fast", 8, ("optimizer.lr=0.0028", *FAST)),
    ("packed8-20-fast", 8, ("optimizer.lr=0.002", *FAST)),
    ("packed8-56-fast-free", 8, ("optimizer.lr=0.0056", *FAST, *FREE)),
    ("packed8-40-fast-free", 8, ("optimizer.lr=0.004", *FAST, *FREE)),
    ("packed8-40-fast-narrow", 8, ("optimizer.lr=0.004", *FAST, "model.residual=bfloat16")),
    ("packed8-other-atc-fast", 8, ("optimizer.lr=0.004", *FAST, "strategy.scheme=atc")),
    ("packed8-other-complete-free", 8, ("optimizer.lr=0.0056", *FAST, *FREE, *COMPLETE)),
    ("packed4-56-fast-free", 4, ("optimizer.lr=0.0056", *FAST, *FREE)),
    ("packed8-other-complete-fast", 8, ("optimizer.lr=0.004", *FAST, "strategy.topology=complete")),
    ("packed4-40-fast", 4, ("optimizer.lr=0.004", *FAST)),
    ("packed4-28-fast", 4, ("optimizer.lr=0.0028", *FAST)),
    ("packed4-56-slow", 4, ("optimizer.lr=0.0056", *SLOW)),
    ("packed4-56-fast", 4, ("optimizer.lr=0.0056", *FAST)),
    ("packed4-80-slow", 4, ("optimizer.lr=0.008", *SLOW)),
]
"""(name, local models, settings); `other` in a name keeps it out of the choice of the best."""


if __name__ == "__main__":
    main()

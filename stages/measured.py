"""Print the tables of measured.md: the ladder on other people's cards, beside arithmetic.

    python stages/measured.py

Every figure was read in the source that stands with it.
"""

from harness.arithmetic import Rates, seconds_per_token
from harness.ladder import with_stage, work_of
from harness.page import NOTHING, markdown

from dataclasses import dataclass
from typing import NamedTuple

from data import VOCAB
from model import CONTEXT, SIZES

COMPARED = ("TF32", "bf16", "compile", "flash attention", "fused AdamW")  # float16 has a single one to compare
NEAR = 15  # percent, within which a prediction counts as near
GPT2 = SIZES["gpt2"] | {"vocab_size": VOCAB, "block_size": CONTEXT}
ACCUM = 32  # micro-batches of a step, where a ladder has several
STAGE_OF = {  # of a technique, as the tables call it
    "float32": "s01_baseline",
    "TF32": "s02_tf32",
    "bf16": "s03_bf16",
    "float16": "s03_bf16",
    "compile": "s04_compile",
    "flash attention": "s05_flash",
    "vocabulary": "s06_vocab",
    "clipping": "s07_clip",
    "schedule": "s08_cosine",
    "decay": "s09_decay",
    "fused AdamW": "s10_fused",
    "32 micro-batches": "s11_accum",
}


class Matmuls(NamedTuple):
    """TFLOP/s of matmuls that are summed in float32. tf32: None for a card without it. bits16: bfloat16 or float16."""

    float32: float
    tf32: float | None
    bits16: float


class Card(NamedTuple):
    """What a card's datasheet promises, without sparsity; bandwidth of its memory in GB/s.

    measured: what large square matmuls reached, None where nobody told all three.
    """

    name: str
    datasheet: Matmuls
    bandwidth: float
    measured: Matmuls | None = None


class Step(NamedTuple):
    """A step of somebody's ladder, with all techniques of the steps before it.

    adds: the techniques that are new in it. The last one names it in the comparison. ms, tokens_per_second: one of them
    or both. derived: whether ms comes from another time that the author wrote. not_compared: whether its ratio to the
    step above is left out of the comparison. The page says why.
    """

    adds: tuple[str, ...]
    ms: float | None = None
    tokens_per_second: float | None = None
    derived: bool = False
    not_compared: bool = False


@dataclass(frozen=True)
class Ladder:
    """What somebody measured on a card, from the slowest step on.

    torch: its version, None where it is not told. amp_dtype: the type of 16 bits that the card trained in.
    """

    card: Card
    author: str
    source: str
    torch: str | None
    batch_size: int
    steps: list[Step]

    amp_dtype: str = "bfloat16"

    @property
    def tokens(self):
        """The tokens of a step."""
        return self.batch_size * GPT2["block_size"]

    def ms(self, step):
        """Return the milliseconds of a step."""
        return 1e3 * self.tokens / step.tokens_per_second if step.ms is None else step.ms

    def tokens_per_second(self, step):
        """Return the tokens per second of a step."""
        return 1e3 * self.tokens / step.ms if step.tokens_per_second is None else step.tokens_per_second

    def predicted_ms(self, index, matmuls):
        """Return the milliseconds that arithmetic gives the step of an index, at the rates of a Matmuls."""
        teraflops = {"float32": matmuls.float32, "tf32": matmuls.tf32, self.amp_dtype: matmuls.bits16}
        known = {dtype: 1e12 * rate for dtype, rate in teraflops.items() if rate is not None}
        rates = Rates(known, copy=1e9 * self.card.bandwidth)
        run = self.run()
        work = work_of("s01_baseline", run)
        for step in self.steps[: index + 1]:
            for technique in step.adds:
                work = with_stage(work, STAGE_OF[technique], run)
        return 1e3 * work.tokens * seconds_per_token(work, rates)

    def run(self):
        """Return what the header of a record of these steps would say, for work_of() and with_stage()."""
        settings = {"batch_size": self.batch_size, "amp_dtype": self.amp_dtype, "compile": True}
        settings |= {"accum": ACCUM, "world_size": 1}
        environment = {"device": "cuda", "tf32": self.card.datasheet.tf32 is not None}
        return {"shape": GPT2, "settings": settings, "environment": environment, "sdpa": "flash"}


def blob(repository, commit, path):
    """Return the address of a file at a commit."""
    return f"https://github.com/{repository}/blob/{commit}/{path}"


H100 = Card("H100", Matmuls(67.0, 495.0, 989.0), 3350, measured=Matmuls(51.88, 402.15, 797.51))

LADDERS = [
    Ladder(
        card=Card("RTX 4090", Matmuls(82.6, 82.6, 165.2), 1008, measured=Matmuls(53.84, 85.65, 164.81)),
        author="XueyanZhang",
        source=blob("XueyanZhang/build_nanogpt_revisit", "b7ecdc1f5cc01ba1c5cc7bddbbb2294504f1fbfd", "README.md"),
        torch="2.10.0",
        batch_size=8,
        steps=[
            Step(("float32",), 315, 26_000),
            Step(("TF32",), 260, 31_300),
            Step(("bf16",), 200, 40_800),
            Step(("compile",), 100, 81_000),
            Step(("flash attention",), 72, 113_000),
            Step(("vocabulary",), 72, 113_000),
            Step(("clipping", "schedule", "decay", "fused AdamW"), 68, 120_000),
        ],
    ),
    Ladder(
        card=Card("RTX 3090", Matmuls(35.6, 35.6, 71.2), 936),
        author="dapopov-st",
        source=blob(
            "dapopov-st/gpt2-from-scratch-to-tiny-stories",
            "11550209e97f796c264ac44e8a36ba60db641799",
            "Part%202:%20Optimize%20GPT-2.ipynb",
        ),
        torch=None,
        batch_size=10,
        steps=[
            Step(("float32",), tokens_per_second=14_100),
            Step(("TF32",), tokens_per_second=19_600),
            Step(("bf16",), tokens_per_second=27_500),
            Step(("compile",), tokens_per_second=41_700),
            Step(("flash attention",), tokens_per_second=50_000),
            Step(("vocabulary",), tokens_per_second=53_000),
        ],
    ),
    Ladder(
        card=Card("RTX A4000", Matmuls(19.2, 38.3, 76.7), 448, measured=Matmuls(11.90, 34.32, 62.78)),
        author="KarthikSundar2002",
        source=blob("KarthikSundar2002/GPT2-from-scratch", "776961cbfdeb0a4330ce49640c74de7b93bcb086", "README.md"),
        torch="2.9.0",
        batch_size=2,
        steps=[
            Step(("float32",), 295.3, derived=True),
            Step(("TF32",), 180.8, derived=True),
            Step(("bf16",), 151.8, derived=True),
            Step(("compile",), 73.2, derived=True, not_compared=True),
            Step(("flash attention",), 58.5, derived=True, not_compared=True),
            Step(("vocabulary",), 54.5, derived=True, not_compared=True),
            Step(("clipping", "schedule", "decay"), 50.7, derived=True, not_compared=True),
            Step(("fused AdamW",), 44.6, derived=True, not_compared=True),
        ],
    ),
    Ladder(
        card=Card("RTX 2070", Matmuls(7.5, None, 29.9), 448, measured=Matmuls(7.90, None, 31.48)),
        author="pavanpreet-gandhi",
        source=blob(
            "pavanpreet-gandhi/reproduce-gpt2",
            "eefa20bd37b417ce8e0edf2682d14078208654c8",
            "7_computational_optimizations.ipynb",
        ),
        torch=None,
        batch_size=2,
        amp_dtype="float16",
        steps=[
            Step(("float32",), tokens_per_second=4_000),
            Step(("float16",), tokens_per_second=8_000, not_compared=True),
            Step(("compile",), tokens_per_second=11_000),
            Step(("flash attention",), tokens_per_second=13_500),
            Step(("vocabulary",), tokens_per_second=14_100),
        ],
    ),
    Ladder(
        card=Card("T4", Matmuls(8.1, None, 65.0), 320, measured=Matmuls(4.17, None, 41.91)),
        author="zzkai098",
        source=blob(
            "zzkai098/reproduce-gpt2", "036e18ac3452cd617bfcf09a253400458fd1eee8", "notebooks/colab_train.ipynb"
        ),
        torch=None,
        batch_size=4,
        amp_dtype="float16",
        steps=[
            Step(("float32",), 1244.1),
            Step(("float16",), 508.6),
        ],
    ),
    Ladder(
        card=Card("L40", Matmuls(90.5, 90.5, 181.0), 864),
        author="loafbaker",
        source=blob("loafbaker/GPT-2-124M", "83cdff19258624973020a9abbdab7ef0e19f783b", "CHANGELOG.md"),
        torch="2.3.1",
        batch_size=16,
        steps=[
            Step(("float32",), tokens_per_second=18_514),
            Step(("TF32",), tokens_per_second=23_888),
            Step(("bf16",), tokens_per_second=30_940),
            Step(("compile",), tokens_per_second=56_368),
            Step(("flash attention",), tokens_per_second=83_282),
            Step(("vocabulary",), tokens_per_second=91_034),
        ],
    ),
    Ladder(
        card=Card("A100 PCIe, 40 GB", Matmuls(19.5, 156.0, 312.0), 1555, measured=Matmuls(17.56, 108.32, 234.14)),
        author="swag2198",
        source=blob("swag2198/build-gpt2-moe", "e038314021e8f071fba4d9713c7e3f19ff96fe5b", "build-gpt2.ipynb"),
        torch="2.4.1",
        batch_size=16,
        steps=[
            Step(("float32",), 1131.17, 14_484),
            Step(("TF32",), 403.40, 40_614),
            Step(("bf16",), 343.68, 47_673),
            Step(("compile",), 157.70, 103_893),
            Step(("flash attention",), 116.97, 140_074),
            Step(("vocabulary",), 113.51, 144_334),
            Step(("clipping",), 115.14, 142_296),
            Step(("schedule",), 114.64, 142_923),
            Step(("decay", "fused AdamW"), 110.61, 148_122),
            Step(("32 micro-batches",), 3518.16 / ACCUM, 149_023, derived=True),
        ],
    ),
    Ladder(
        card=Card("A100 SXM, 80 GB", Matmuls(19.5, 156.0, 312.0), 2039),
        author="the lecture",
        source="https://www.youtube.com/watch?v=l8pRSuU81PU",
        torch=None,
        batch_size=16,
        steps=[
            Step(("float32",), 1000),
            Step(("TF32",), 333),
            Step(("bf16",), 300),
            Step(("compile",), 130),
            Step(("flash attention",), 96),
            Step(("vocabulary",), 93),
            Step(("clipping", "schedule", "decay", "fused AdamW"), 90),
        ],
    ),
    Ladder(
        card=H100,
        author="cweill",
        source="https://github.com/cweill/build-nanogpt2/commit/4eac0d7a50da442ce2e2cba8848f958256e64a4c",
        torch="2.7.1",
        batch_size=32,
        steps=[
            Step(("TF32", "bf16"), tokens_per_second=69_722),
            Step(("compile",), tokens_per_second=184_196),
            Step(("flash attention",), tokens_per_second=269_935),
            Step(("vocabulary",), tokens_per_second=292_312),
        ],
    ),
    Ladder(
        card=H100,
        author="submarat",
        source=blob("submarat/gpt2-small-repro", "014b245cd8736864b49f8d86d01d75be795f80bc", "OPTIMIZATION.md"),
        torch="2.13.0",
        batch_size=8,
        steps=[
            Step(("float32",), 223.83, 36_599),
            Step(("TF32",), 122.93, 66_639, not_compared=True),
            Step(("bf16",), 116.90, 70_079, not_compared=True),
            Step(("flash attention",), 76.52, 107_060, not_compared=True),
            Step(("compile",), 49.97, 163_923, not_compared=True),
            Step(("fused AdamW",), 44.32, 184_839, not_compared=True),
        ],
    ),
]


TEXTS = ("card", "by", "technique")  # columns that are aligned to the left
DATASHEET, MEASURED = "by datasheet", "by measured matmuls"  # columns of predictions


def label(step):
    """Return how the tables name a step."""
    return ", ".join(step.adds)


def speeds(ladder, step):
    """Return the cells (tokens per second, ms) of a step. A star is on what its author did not write."""
    tokens, ms = f"{ladder.tokens_per_second(step):,.0f}", f"{ladder.ms(step):,.0f}"
    if step.tokens_per_second is None:
        tokens += "*"
    if step.ms is None or step.derived:
        ms += "*"
    return tokens, ms


def predictions(ladder, first, last):
    """Return {column: how many times as fast arithmetic says one step is as an earlier one}, by their indexes."""
    ratios = {}
    for column, matmuls in ((DATASHEET, ladder.card.datasheet), (MEASURED, ladder.card.measured)):
        if matmuls is not None:
            ratios[column] = ladder.predicted_ms(first, matmuls) / ladder.predicted_ms(last, matmuls)
    return ratios


def ladder_table(ladder):
    """Return the table of one ladder."""
    columns = [DATASHEET] if ladder.card.measured is None else [DATASHEET, MEASURED]
    rows = []
    for index, step in enumerate(ladder.steps):
        tokens, ms = speeds(ladder, step)
        row = {"technique": label(step), "tok/sec": tokens, "ms": ms, "x above": NOTHING}
        row |= dict.fromkeys(columns, NOTHING)
        if index > 0:
            row["x above"] = f"{ladder.ms(ladder.steps[index - 1]) / ladder.ms(step):.2f}"
            row |= {column: f"{ratio:.2f}" for column, ratio in predictions(ladder, index - 1, index).items()}
        rows.append(row)
    return markdown(rows, TEXTS)


def overview():
    """Return the table of all ladders, from their first step to their last."""
    rows = []
    for ladder in LADDERS:
        first, last = ladder.steps[0], ladder.steps[-1]
        row = {
            "card": f"[{ladder.card.name}]({ladder.source})",
            "by": ladder.author,
            "B": str(ladder.batch_size),
            "PyTorch": ladder.torch or NOTHING,
            "tok/sec": f"{speeds(ladder, first)[0]} → {speeds(ladder, last)[0]}",
            "all together": f"{ladder.ms(first) / ladder.ms(last):.2f}",
            DATASHEET: NOTHING,
            MEASURED: NOTHING,
        }
        row |= {column: f"{ratio:.2f}" for column, ratio in predictions(ladder, 0, len(ladder.steps) - 1).items()}
        sum_of_last = ladder.predicted_ms(len(ladder.steps) - 1, ladder.card.datasheet)
        row["last step, x its sum"] = f"{ladder.ms(last) / sum_of_last:.2f}"
        rows.append(row)
    return markdown(rows, TEXTS)


def rates_table():
    """Return the table of what the datasheets promise, and in brackets what large matmuls reached."""
    rows = {}
    for ladder in LADDERS:
        card = ladder.card
        row = {"card": card.name}
        for kind, column in (("float32", "float32"), ("tf32", "TF32"), ("bits16", "16 bits")):
            promised = getattr(card.datasheet, kind)
            row[column] = NOTHING if promised is None else f"{promised:g}"
            if promised is not None and card.measured is not None:
                row[column] += f" ({getattr(card.measured, kind):.1f})"
        row["GB/s"] = f"{card.bandwidth:,}"
        rows[card.name] = row
    return markdown(list(rows.values()), TEXTS)


def range_of(percents):
    """Return the least and the most of some percents as a text."""
    if not percents:
        return NOTHING
    least, most = f"{min(percents):+.0f}", f"{max(percents):+.0f}"
    if least == most:
        return f"{least} %"
    return f"{least} to {most} %"


def accuracy_table():
    """Return the table of how far the measured ratios of a technique lie from the predicted ones, over all ladders."""
    errors = {technique: {DATASHEET: [], MEASURED: []} for technique in COMPARED}
    for ladder in LADDERS:
        for index, step in enumerate(ladder.steps):
            technique = step.adds[-1]
            if index == 0 or step.not_compared or technique not in COMPARED:
                continue
            measured = ladder.ms(ladder.steps[index - 1]) / ladder.ms(step)
            for column, ratio in predictions(ladder, index - 1, index).items():
                errors[technique][column].append(100 * (measured / ratio - 1))
    rows = []
    for technique, by_column in errors.items():
        row = {"technique": technique}
        for column, percents in by_column.items():
            within = sum(abs(percent) <= NEAR for percent in percents)
            row[f"off {column}"] = range_of(percents)
            row[f"within {NEAR} % {column}"] = f"{within} of {len(percents)}"
        rows.append(row)
    return markdown(rows, TEXTS)


def tables():
    """Return {name: table} of all tables that the page has."""
    drawn = {"all": overview(), "how far off": accuracy_table(), "rates": rates_table()}
    for ladder in LADDERS:
        drawn[f"{ladder.card.name}, {ladder.author}"] = ladder_table(ladder)
    return drawn


if __name__ == "__main__":
    for title, drawn in tables().items():
        print(f"{title}\n\n{drawn}\n")

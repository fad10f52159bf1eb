"""Threads that share a model: nobody waits for another's whole text, and nobody sees another's edits."""

import signal
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext

import pytest
import torch
from conftest import LLAMA, Letters, random_model
from few import few_of
from transformers import LlamaConfig

from icebear import Model, attribute, steer
from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.run import first_layers
from icebear.concepts.stages.stages import Stages, stages_of

PROMPT, OTHER = "The ice bear", "A camel lives"
EDITS = ["L1.ffn.3=7@generated", "L0.head.2*0@last", "L2.v.4+1.5@all~0.9", "L1.ffn.6=5@answer"]
OTHER_EDITS = ["L1.ffn.3=-9", "L2.ffn.5=4@generated"]
TOKENS = 40


class Writer(Letters):
    pad_token_id = eos_token_id = None

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row.tolist())) for row in rows]


def insides(net):
    """The attributes of every module, its hooks and parameters among them."""
    return [
        {
            name: [*map(id, value), *map(id, value.values())] if isinstance(value, dict) else id(value)
            for name, value in vars(module).items()
        }
        for module in net.modules()
    ]


@pytest.fixture
def writer():
    """A random model that writes on and on; after a test nothing is left in it, and nobody has its lock."""
    made = random_model(LlamaConfig(**{**LLAMA.to_dict(), "max_position_embeddings": 300}), dtype=torch.float32)
    made.net.generation_config.eos_token_id = None
    model = Model(made.net, Writer(), "writer")
    before, random = insides(model.net), torch.get_rng_state()
    yield model
    assert insides(model.net) == before
    assert torch.equal(torch.get_rng_state(), random)
    at_once(lambda: model.predict(PROMPT))


def at_once(*tasks):
    """What functions, each in a thread, return or raise."""
    result = [None] * len(tasks)

    def run(number):
        try:
            result[number] = tasks[number]()
        except Exception as error:
            result[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return result


def write(model, edits, count, on_token=None, **options):
    with steer(model, edits) if edits else nullcontext():
        return model.generate(PROMPT, count, on_token=on_token, **options)


def as_lists(answer):
    """Of `predict` or `attribute`."""
    return answer if isinstance(answer, list) else [answer.tokens.tolist(), answer.ffn.tolist(), answer.attn.tolist()]


@pytest.mark.parametrize(("query", "edits"), [(attribute, []), (Model.predict, EDITS)], ids=["plain", "steered"])
def test_at_most_two_tokens_are_written_between_a_request_and_its_answer(writer, edits, query):
    """And answer and text are as they are alone. Counted from when the request stands in the queue until it lets go of
    the model: when a thread gets its processor is not ours to say."""
    alone, text_alone = as_lists(query(writer, OTHER)), write(writer, edits, TOKENS)
    written, begun, waits, stamps, asker = [0], threading.Event(), [], [], []

    def stamp():
        if threading.get_ident() in asker:
            stamps.append(written[0])

    class Queue(deque):
        def append(self, ticket):
            stamp()
            super().append(ticket)

    def leave(left=writer.lock._leave):
        stamp()
        left()

    writer.lock._waiting, writer.lock._leave = Queue(), leave

    def on_token(count):
        written[0] = count
        begun.set()
        time.sleep(0.01)  # the tokens of real models take longer

    def ask():
        begun.wait()
        asker.append(threading.get_ident())
        while written[0] < TOKENS:
            stamps.clear()
            answer = query(writer, OTHER)
            waits.append(sum(stamps[1::2]) - sum(stamps[::2]))
            assert as_lists(answer) == alone

    text, failure = at_once(lambda: write(writer, edits, TOKENS, on_token), ask)
    assert failure is None
    assert text == text_alone
    assert len(waits) > 1
    assert max(waits) <= 2


@pytest.mark.parametrize(("temperature", "breaks"), few_of([(0.0, True), (2.0, False)], (2.0, False)))
def test_two_texts_are_written_in_turn_and_are_as_alone(writer, temperature, breaks):
    """Also drawn ones, and where the one that began first ends first, or fails."""
    options = {"temperature": temperature}
    first_alone = write(writer, EDITS, 30, seed=1, **options)
    second_alone = write(writer, OTHER_EDITS, 60, seed=2, **options)
    assert first_alone.split()[:30] != second_alone.split()[:30]
    order, begun = [], threading.Event()

    def first(count):
        order.append("first")
        begun.set()
        time.sleep(0.005)
        if breaks and count == 25:
            raise ZeroDivisionError

    def other():
        begun.wait()
        return write(writer, OTHER_EDITS, 60, lambda count: order.append("second"), seed=2, **options)

    result, second = at_once(lambda: write(writer, EDITS, 30, first, seed=1, **options), other)
    assert isinstance(result, ZeroDivisionError) if breaks else result == first_alone
    assert second == second_alone
    assert order.index("second") < 10
    assert order[-1] == "second"


@pytest.fixture
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, also where pytest-xdist has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_another_has_its_turn(writer, interrupts):
    """It comes when the turn is back, so that the model is left as it was found."""
    clean, main, seen = insides(writer.net), threading.main_thread().ident, []

    def other():
        with writer.lock:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.2)
            seen.append(insides(writer.net))

    def on_token(count):
        if count == 3:
            threading.Thread(target=other).start()
            while not writer.lock._waiting:
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        write(writer, EDITS, 20, on_token)
    assert seen == [clean]


def test_stages_read_their_prompts_alone(writer, monkeypatch):
    """A thread that explains a longer prompt meanwhile sees none of their hooks."""
    relevance = attribute(writer, PROMPT, contrast="z", counterfactual=OTHER)
    alone, begun, reading = attribute(writer, PROMPT * 2), threading.Event(), Values.reading

    @contextmanager
    def slow(self, model):
        with reading(self, model):
            begun.set()
            time.sleep(0.1)  # in which the other thread runs, if it may
            yield

    monkeypatch.setattr(Values, "reading", slow)
    result, other = at_once(
        lambda: stages_of(writer, relevance), lambda: begun.wait(60) and attribute(writer, PROMPT * 2)
    )
    assert isinstance(result, Stages), result
    assert as_lists(other) == as_lists(alone)


def test_a_fingerprint_is_of_the_complete_model_while_another_thread_runs_few_layers(writer):
    expected, cut, release = writer.fingerprint, threading.Event(), threading.Event()

    def few():
        with writer.lock, first_layers(writer, 1):
            cut.set()
            release.wait(10)

    def ask():
        cut.wait(10)
        threading.Timer(0.2, release.set).start()
        return writer.fingerprint

    assert at_once(few, ask)[1] == expected

"""Tokens to text: what is released, when, and that neither chunks of tokens nor stop strings change the text."""

from functools import cache, partial
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdecpp import Decoder, Pair
from specdecpp.backends import LeanModel
from specdecpp.detokenize import Detokenizer
from specdecpp.policies import Fixed
from specdecpp.serving.evidence import Recorder
from specdecpp.testing import tiny_model

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then the dog jumps back.",
    "Übermäßig naïve façades: garçon, smörgåsbord, Ångström.",
    "你好世界。快速的棕色狐狸跳过了懒狗。",
    "Family 👩\u200d👩\u200d👧\u200d👦 and flags 🇩🇪🇫🇷, faces 😀😂🥲.",
]


@cache
def byte_bpe():
    """A byte-level BPE with few merges, so that most characters beyond ASCII are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@cache
def byte_fallback(num_bytes=256):
    """The form of sentencepiece models: spaces as ▁, one stripped at the start, unknown characters as <0x..> bytes."""
    pieces = ["<unk>", "▁", "▁a", "a", "b", "ab", "é", *(f"<0x{b:02X}>" for b in range(num_bytes))]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@cache
def pieces_of(alphabet="abc", longest=3):
    """A tokenizer with a token for every short string, so that a text can be cut into tokens in any way."""
    strings = [""]
    for _ in range(longest):
        strings += [s + c for s in strings for c in alphabet if s + c not in strings]
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(dict.fromkeys(strings[1:]))}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def read(tokenizer, tokens, stop=()):
    """(pieces released until a stop, whether it stopped); what is held back at the end is flushed."""
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in tokens:
        text, is_stopped = detokenizer.push(token)
        pieces.append(text)
        if is_stopped:
            return pieces, True
    return [*pieces, detokenizer.flush()], False


def cut(text, stop):
    """What must come out: the text before the stop string that is completed first (of two at once, the longer)."""
    hits = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(hits)[1]], True) if hits else (text, False)


@given(tokens=st.lists(st.integers(0, 319), max_size=30))
@example(tokens=[])
def test_pieces_add_up_for_any_tokens(tokens):
    """Catches text that is lost, doubled or broken where a character spans tokens, or is no valid UTF-8 at all."""
    tokenizer = byte_bpe()
    pieces, is_stopped = read(tokenizer, [t for t in tokens if t < len(tokenizer)])
    assert "".join(pieces) == tokenizer.decode([t for t in tokens if t < len(tokenizer)], skip_special_tokens=True)
    assert not is_stopped


@pytest.mark.parametrize("make", [byte_bpe, byte_fallback])
@given(text=st.text(st.sampled_from("ab é你好👩\u200d👧🇩ßfox"), max_size=20))
@example(text=" a  b ")
@example(text=SENTENCES[3])
def test_no_piece_of_a_text_is_broken(make, text):
    """Catches half a character released before its last byte, and a space lost or stripped at a token's edge."""
    tokenizer = make()
    tokens = tokenizer.encode(text)
    pieces, _ = read(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert "\ufffd" not in "".join(pieces)


def test_an_answer_keeps_the_space_that_parts_it_from_its_prompt():
    """Catches "The capitalof France": a decoder that strips the first space of a text does so behind a prompt too."""
    tokenizer, text = byte_fallback(), "ab a 你ß a é"
    tokens = tokenizer.encode(text)
    heads = [tokenizer.decode(tokens[:at]) for at in range(len(tokens))]
    for at in (at for at, head in enumerate(heads) if at and text.startswith(head)):
        detokenizer = Detokenizer(tokenizer, before=tokens[:at][-4:])
        assert heads[at] + "".join(detokenizer.push(t)[0] for t in tokens[at:]) == text


def test_of_special_tokens_only_those_around_a_call_are_shown():
    """Catches a call that is lost where its tags are special tokens, as with Hermes."""
    tokenizer = byte_fallback.__wrapped__()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<eot>"]})
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode("<eot><tool_call>ab</tool_call><eot>")
    assert "".join(detokenizer.push(token)[0] for token in tokens) == tokenizer.decode(tokens[1:-1])


def test_text_is_released_as_soon_as_it_is_whole():
    """Catches text that is held back though nothing can change it any more."""
    tokenizer = byte_bpe()
    tokens = [tokenizer.encode(c)[0] for c in "fox"] + tokenizer.encode("你") + tokenizer.encode("!")
    assert len(tokenizer.encode("你")) > 1
    pieces, _ = read(tokenizer, tokens)
    assert [p for p in pieces if p] == ["f", "o", "x", "你", "!"]
    assert pieces[:3] == ["f", "o", "x"]
    assert pieces[-2:] == ["!", ""]


def test_spaces_are_left_as_the_model_wrote_them():
    """Catches decoding that tidies up: "a ." for the model would be "a." for the reader."""
    tokenizer = pieces_of("a .", longest=2)
    ids = tokenizer.convert_tokens_to_ids(["a", " .", " ", "a"])
    assert "".join(read(tokenizer, ids)[0]) == "a . a"


def test_flush_gives_up_on_an_incomplete_character():
    """Catches an answer that ends inside a character and loses what came before it."""
    tokenizer = byte_bpe()
    tokens = [*tokenizer.encode("a"), tokenizer.encode("你")[0]]
    assert read(tokenizer, tokens) == (["a", "", "\ufffd"], False)


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces=st.lists(st.text("abc", min_size=1, max_size=3), max_size=8), stop=STOPS)
@example(pieces=["ab", "ca", "abc"], stop=["bcaa"])
@example(pieces=["ab", "c"], stop=["ab", "bc"])
@example(pieces=["c", "a", "b"], stop=["aa", "cab"])
@example(pieces=["a", "b", "c"], stop=["b", "abc"])
@example(pieces=["abc"], stop=["b", "abc"])
def test_stop_strings_cut_the_text_wherever_tokens_fall(pieces, stop):
    """Catches a stop string that is missed across tokens, released in part, or held back for ever, and one inside another that
    wins or not as tokens fall."""
    tokenizer = pieces_of()
    tokens = tokenizer.convert_tokens_to_ids(pieces)
    released, is_stopped = read(tokenizer, tokens, stop)
    assert ("".join(released), is_stopped) == cut("".join(pieces), stop)


@given(text=st.text(st.sampled_from("aé你👧"), max_size=8), stop=st.text(st.sampled_from("aé你👧"), min_size=1, max_size=3))
def test_stop_strings_beyond_ascii(text, stop):
    """Catches a stop string that is compared before its characters are whole; merged tokens and single bytes agree."""
    tokenizer = byte_bpe()
    alphabet = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    single_bytes = tokenizer.convert_tokens_to_ids(list("".join(piece for piece, _ in alphabet)))
    for tokens in (tokenizer.encode(text), single_bytes):
        released, is_stopped = read(tokenizer, tokens, [stop])
        assert ("".join(released), is_stopped) == cut(text, [stop])


def test_the_beginning_of_a_stop_string_is_held_back_until_decided():
    """Catches a client that sees half a stop string, and text that never comes once it is none."""
    tokenizer = pieces_of()
    ids = tokenizer.convert_tokens_to_ids
    assert read(tokenizer, ids(["a", "b", "a", "b", "c"]), ["abc"]) == (["", "", "ab", "", ""], True)
    assert read(tokenizer, ids(["a", "b", "b"]), ["abc"]) == (["", "", "abb", ""], False)
    assert read(tokenizer, ids(["c", "ab"]), ["abc"]) == (["c", "", "ab"], False)


@pytest.mark.parametrize("make", [byte_bpe, partial(byte_fallback, 0)])
def test_tokens_with_scores_begin_where_their_offsets_say(make):
    """Catches a space that is lost, and a character of several tokens that counts once for each."""
    tokenizer = make()
    model = LeanModel(tiny_model("llama", vocab_size=len(tokenizer)))
    decoder = Decoder(Pair(target=model, draft=model, tokenizer=tokenizer), policy=Fixed(k=2))
    session = decoder.start("ab a", seed=1, max_tokens=60)
    session.watch = recorder = Recorder(session, tokenizer, num_top=0)
    text, scores = "", []
    while session.finish_reason is None:
        step = session.step()
        text, scores = text + step.text, [*scores, *recorder.evidence(step).scores]
    rests = [text[at:].lstrip("\ufffd") for at in accumulate((score.num_shown for score in scores), initial=0)]
    assert not rests[-1]
    assert "\ufffd" in text or all(rest.startswith(one.text) for rest, one in zip(rests, scores, strict=False) if one.num_shown)

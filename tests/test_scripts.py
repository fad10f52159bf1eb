"""Search in all scripts: a word finds the sentences that have it, however it is written, and no others."""

# ruff: noqa: RUF001
import itertools
import random
import unicodedata

import pytest
from sqlite_utils import Database

from icebear import open_store
from icebear.actmax.index.corpus import sentence_id
from icebear.db import example_tables
from icebear.db.search import absent_words
from icebear.db.terms import has_words, padded, query_of, terms, words, words_of
from icebear.errors import InputError
from icebear.records import Sentence

SENTENCES = {
    "arabic": "العربية لغة جميلة. مَرْحَبًا بِالعَالَمِ. أهلاً وسهلاً. العـــربية",
    "armenian": "Հայերենը գեղեցիկ լեզու է։ Երևան",
    "bengali": "বাংলা একটি ভাষা। কলকাতা বড় শহর।",
    "burmese": "မြန်မာစာသည် ဘာသာစကားဖြစ်သည်။ ရန်ကုန်မြို့",
    "chinese": "北京是一个很大的城市，人口很多。臺灣 iPhone手机2024年",
    "dutch": "De ijsbeer eet één zeehond; coördinatie.",
    "english": "The polar bear can't swim to Café No. 42 (Ursus maritimus).",
    "ethiopic": "አማርኛ ቋንቋ ነው። አዲስ አበባ",
    "french": "Où est l’élève? Le cœur, naïf, à Genève.",
    "full width": "ＰＹＴＨＯＮ と ﾊﾟｿｺﾝ ﬁve m²",
    "georgian": "ქართული ენა ლამაზია. თბილისი",
    "german": "Die schöne Straße in Köln; weiß, Öl, Übergröße.",
    "greek": "Η ελληνική γλώσσα είναι ωραία. Οδυσσεύς ᾳ",
    "gujarati": "ગુજરાતી એક ભાષા છે.",
    "hebrew": "שָׁלוֹם עוֹלָם. ירושלים היא עיר גדולה",
    "hindi": "हिन्दी एक भाषा है। दाल और हल; क़लम",
    "japanese": "東京は大きい都市です。ジョン・スミスさんはパソコンが好き。ガギグ",
    "javanese": "ꦧꦱꦗꦮ",
    "kannada": "ಕನ್ನಡ ಒಂದು ಭಾಷೆ.",
    "khmer": "ភាសាខ្មែរ\u200bជាភាសា\u200bផ្លូវការ។ ភ្នំពេញ",
    "korean": "안녕하세요 세계 여러분. 서울은 큰 도시이다. 세계는 넓다",
    "lao": "ພາສາລາວເປັນພາສາ ວຽງຈັນ ນ້ຳ",
    "malayalam": "മലയാളം ഒരു ഭാഷയാണ്. കേരളം",
    "mongolian": "ᠮᠣᠩᠭᠣᠯ ᠬᠡᠯᠡ",
    "new letters": "\U0001e900\U0001e901 \U00031350\U00031351 \U00010d4a",
    "persian": "می‌خواهم به ایران بروم.",
    "punjabi": "ਪੰਜਾਬੀ ਇੱਕ ਭਾਸ਼ਾ ਹੈ।",
    "russian": "Русский язык. Влади́мир ёлка, мой",
    "sinhala": "සිංහල භාෂාව ශ්‍රී ලංකා",
    "tamil": "தமிழ் மொழி. மழை பெய்தது கொடு",
    "telugu": "తెలుగు ఒక భాష.",
    "thai": "ภาษาไทยเป็นภาษาที่สวยงาม กรุงเทพฯ น้ำ",
    "tibetan": "བོད་ཡིག་ནི་སྐད་ཡིག་ཅིག་ཡིན། ལྷ་ས།",
    "turkish": "İstanbul büyük; ılık IRMAK, ışık Iğdır",
    "ukrainian": "Київ — столиця, з’їзд; мої",
    "vietnamese": "tiếng Việt rất đẹp. Hồ Chí Minh",
    "yi": "ꆈꌠꉙ",
}
OTHERS = ("A boat lay on the sand.", "दल", "세 계", "京東", "ไทย", "ཡིག", "عالمي", "The icebergs twice")
UNSPACED = ("burmese", "chinese", "full width", "japanese", "javanese", "khmer", "korean", "lao", "thai", "yi")
ACCENTS = {"COMBINING", "ARABIC", "HEBREW"}


def forms(word):
    """Ways in which people and programs write a word."""
    same = unicodedata.normalize("NFC", word)
    for written in (word, word.upper(), word.lower()):
        yield written
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            if unicodedata.normalize("NFC", unicodedata.normalize(form, word)) == same:
                yield unicodedata.normalize(form, written)


def plain(text):
    """Another way to leave out case and accents, character by character."""
    text = text.replace("ı", "i").replace("\u0640", "")
    for _ in range(2):
        text = unicodedata.normalize("NFKD", text).casefold()
    kept = [c for c in text if not is_accent(c) and unicodedata.category(c) != "Cf"]
    return unicodedata.normalize("NFC", "".join(kept))


def is_accent(character):
    name = unicodedata.name(character, " ")
    return unicodedata.category(character) == "Mn" and name.split()[0] in ACCENTS and "KANA" not in name


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The sentences, half of them decomposed, among random cuts of them."""
    seed, path = random.Random(0), tmp_path_factory.mktemp("scripts") / "s.db"
    texts = [*SENTENCES.values(), *OTHERS, *(text[seed.randrange(len(text)) :] for text in SENTENCES.values())]
    texts = [unicodedata.normalize(("NFC", "NFD")[number % 2], text) for number, text in enumerate(texts)]
    with open_store(path, create=True) as made:
        save(made, [text for text in texts if text.strip()])
    with open_store(path) as opened:
        yield opened


def save(store, texts):
    rows = [(Sentence(sentence_id(text), text, "", 0, len(text), (text,)), b"") for text in texts]
    store.scan.commit({0: rows}, {}, {"corpus": "scripts"})


def matched(store, word):
    ids = store.sentences.matching(query_of([word]), 1000)
    assert len(ids) == store.sentences.count(query_of([word]))
    return {sentence.text for sentence in store.sentences.of(ids).values()}


def everything(store):
    return list(store.sentences.texts())


@pytest.mark.parametrize("script", SENTENCES)
def test_each_word_of_a_sentence_finds_it_however_it_is_written(store, script):
    sentence = SENTENCES[script]
    having = {text for text in everything(store) if plain(text) == plain(sentence)}
    assert having
    for word in words(sentence):
        for form in forms(word):
            for spelled in words_of(form):
                assert having <= matched(store, spelled), (word, spelled)
            assert absent_words(store, form) == []


@pytest.mark.parametrize("script", SENTENCES)
def test_what_is_found_is_between_words_and_parts_of_the_text(store, script):
    """Each sentence that has the word between spaces, none that lacks it as a part, and by the table as without it."""
    for word in words(SENTENCES[script]):
        found = matched(store, word)
        part = {text for text in everything(store) if plain(word) in plain(text)}
        alone = {text for text in everything(store) if plain(word) in plain(text).split()}
        assert alone <= found <= part
        assert found == {text for text in everything(store) if padded(word) in padded(text)}


@pytest.mark.parametrize("script", UNSPACED)
def test_each_part_of_a_word_is_found_where_no_space_ends_it(store, script):
    """What a substring search finds, of one, two, three characters and more."""
    for word in words(unicodedata.normalize("NFC", SENTENCES[script])):
        if terms(word).count(" ") == len(plain(word)) - 1:  # all its characters are terms
            for start, length in itertools.product(range(len(plain(word))), (1, 2, 3, 7)):
                piece = plain(word)[start : start + length]
                assert matched(store, piece) == {text for text in everything(store) if piece in plain(text)}, piece


def test_absence_is_claimed_only_where_no_text_has_the_letters(store):
    seed = random.Random(1)
    letters = sorted({letter for text in SENTENCES.values() for letter in text if has_words(letter)})
    claimed = 0
    for length in (1, 2, 3, 4) * 100:
        word = "".join(seed.choices(letters, k=length)) if length > 2 else cut(seed, length)
        for part in absent_words(store, word) if has_words(word) else ():
            claimed += 1
            assert not any(plain(part) in plain(text) for text in everything(store)), part
    assert claimed > 50
    for inside, missing in (("ceber", []), ("wice", []), ("dragon", ["dragon"]), ("कमल 南京 ice", ["कमल", "南京"])):
        assert absent_words(store, inside) == missing


def cut(seed, length):
    text = seed.choice([*SENTENCES.values()])
    start = seed.randrange(len(text))
    return text[start : start + length]


def test_marks_of_hindi_are_letters_and_accents_are_not(store):
    assert words("हिन्दी") == ["हिन्दी"]
    assert SENTENCES["hindi"] in matched(store, "दाल")
    assert unicodedata.normalize("NFD", "दल") in matched(store, "दल")
    assert not matched(store, "दल") & matched(store, "दाल")
    for plainly, script in (("Geneve", "french"), ("schone", "german"), ("dep", "german"), ("مرحبا", "arabic")):
        having = {text for text in matched(store, plainly) if plain(text) == plain(SENTENCES[script])}
        assert bool(having) == (plainly != "dep")


@pytest.mark.parametrize(
    ("text", "part"), [("정말 ㅋㅋㅠㅠ", "ㅋㅋ"), ("정말 ㅋㅋㅠㅠ", "ㅠㅠ"), ("ㅎㅎㅏ", "ㅎㅎ"), ("ㅇㅏㄴㅣ", "ㅇ")]
)
def test_single_korean_letters_do_not_become_syllables(text, part):
    assert terms(part) in terms(text)
    assert "큐" not in terms(text)


def test_no_word_goes_across_what_stands_between(store):
    """In unspaced scripts too; also where a line ends, because Korean has spaces."""
    for text in ("城市人", "계여", "ンス"):
        assert matched(store, text) == set()
        assert absent_words(store, text) == [text]


def test_all_characters_are_the_same_in_all_forms(generator):
    codes = [*range(0x3000), *generator.sample(range(0x3000, 0x110000), 3000)]
    for character in map(chr, codes):
        if unicodedata.category(character) != "Cs" and words(character):
            for form in forms(character):
                assert terms(form) == terms(character), hex(ord(character))


@pytest.mark.parametrize("text", ["", "!?", "\u0301", "\u200d", "—", None, 5, "\ud800"])
def test_a_text_without_words_is_refused(text):
    with pytest.raises(InputError):
        words_of(text)


# --- stores that were made before --------------------------------------------------------------------------


@pytest.fixture
def old(store, tmp_path):
    """The same store as version 12 had it: its search reads the texts as they are."""
    path = tmp_path / "old" / "s.db"
    path.parent.mkdir()
    database = Database(path)
    store.database.conn.backup(database.conn)
    for change in ("DROP TABLE sentences_fts", "PRAGMA user_version = 12", "PRAGMA journal_mode = DELETE"):
        database.execute(change)
    database["sentences"].enable_fts(["text"], create_triggers=True)
    database.close()
    return path


def test_an_old_store_is_searched_like_a_new_one_and_stays_as_it_is(store, old):
    before = old.read_bytes()
    for _ in range(2):
        with open_store(old) as opened:
            for word in itertools.chain(*map(words, [*SENTENCES.values(), *OTHERS])):
                query = query_of([word])
                assert opened.sentences.matching(query, 9) == store.sentences.matching(query, 9)
                assert opened.sentences.count(query) == store.sentences.count(query)
            assert absent_words(opened, "dragon 東京 सेब") == ["dragon", "सेब"]
    assert old.read_bytes() == before
    assert list(old.parent.iterdir()) == [old]


def test_an_old_store_that_nobody_may_write_is_searched(old):
    old.chmod(0o400)
    old.parent.chmod(0o500)
    try:
        with open_store(old) as opened:
            assert matched(opened, "세계")
    finally:
        old.parent.chmod(0o700)


def test_a_scan_of_an_old_store_goes_on(old):
    texts = ["南京在江苏。", SENTENCES["chinese"], "南京在江苏。"]
    with open_store(old) as opened:
        assert matched(opened, "南京") == set()
        save(opened, texts)
        assert matched(opened, "南京") == {texts[0]}
    with open_store(old) as opened:
        assert matched(opened, "南京") == {texts[0]}
        assert opened.database.execute("INSERT INTO sentences_fts(sentences_fts) VALUES('integrity-check')")


def test_a_stopped_copy_of_the_search_is_made_again(old, monkeypatch):
    def stopped(text):
        raise KeyboardInterrupt

    with open_store(old) as opened:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(example_tables, "terms", stopped)
            opened.sentences.count(query_of(["세계"]))
        assert matched(opened, "세계")


def test_a_sentence_that_comes_again_is_saved_once(tmp_path):
    with open_store(tmp_path / "s.db", create=True) as made:
        save(made, ["東京です。", "東京です。"])
        save(made, ["東京です。", "北京です。"])
        assert (made.count("sentences"), made.sentences.count(query_of(["京"]))) == (2, 2)
        made.database.execute("INSERT INTO sentences_fts(sentences_fts) VALUES('integrity-check')")

"""What a suffix proposer keeps of requests: the running ones followed exactly, past answers within a bound."""

from cpuspec.sequence import Sequence
from cpuspec.settings import SamplingParams
from cpuspec.speculation.drafters.lookups import NUM_TOKENS, LookupProposer


def request(id: int, prompt: list[int], answer: list[int] | None = None) -> Sequence:
    seq = Sequence.new(id, prompt, SamplingParams())
    seq.extend(answer or [])
    return seq


def remembering(answers: list[list[int]], **settings: int | bool) -> LookupProposer:
    proposer = LookupProposer("suffix", min_prob=0.0, **settings)  # type: ignore[arg-type]
    for id, answer in enumerate(answers):
        seq = request(1000 + id, [9])
        proposer.begin(seq, 0)
        seq.extend(answer)
        proposer.end(seq)
    return proposer


def drafted(proposer: LookupProposer, prompt: list[int], limit: int = 64) -> list[int]:
    seq = request(0, prompt)
    proposer.begin(seq, 0)
    (draft,) = proposer.propose([seq], [limit])
    proposer._texts.clear()  # this one leaves no answer
    return draft.tokens.tolist()


def test_past_answers_are_drafted_from_and_end_where_they_ended() -> None:
    assert drafted(remembering([]), [4, 5]) == []
    proposer = remembering([[4, 5, 6, 7], [8, 8]])
    assert drafted(proposer, [4, 5]) == [6, 7]
    assert drafted(proposer, [4, 5], limit=1) == [6]
    assert drafted(proposer, [6, 7]) == []


def test_only_an_answer_is_remembered_and_only_once_it_ended() -> None:
    proposer, seq = LookupProposer("suffix", min_prob=0.0), request(1, [4, 5, 6])
    proposer.begin(seq, 0)
    proposer.propose([seq.with_drafted([7, 8])], [4])
    seq.extend([7, 3])
    assert drafted(proposer, [7]) == []
    proposer.begin(seq, 0)
    proposer.end(seq)
    assert drafted(proposer, [7]) == [3]
    assert drafted(proposer, [5]) == []


def test_answers_are_remembered_for_requests_of_their_salt_alone_and_the_bound_is_for_all() -> None:
    def salted(id: int, tokens: list[int], salt: str) -> Sequence:
        return Sequence.new(id, tokens, SamplingParams(cache_salt=salt))

    proposer = LookupProposer("suffix", min_prob=0.0, max_past_tokens=8)
    for id, salt in enumerate("ab"):
        seq = salted(id, [0], salt)
        proposer.begin(seq, 0)
        seq.extend([4, 5, 6 + id])
        proposer.end(seq)
    for salt, wanted in (("a", [6]), ("b", [7]), ("", []), ("c", [])):
        seq = salted(9, [4, 5], salt)
        proposer.begin(seq, 0)
        assert proposer.propose([seq], [1])[0].tokens.tolist() == wanted
    seq.extend([1])
    proposer.end(seq)
    assert set(proposer._past) == {"b", "c"}  # the salt that was used longest ago makes room


def test_what_the_request_holds_comes_before_what_others_answered() -> None:
    assert drafted(remembering([[4, 5, 6]]), [4, 5, 7, 4, 5], limit=1) == [7]


def test_a_quotation_goes_on_behind_a_word_that_was_changed() -> None:
    passage = list(range(10, 20))
    assert drafted(remembering([]), [*passage, 1, *passage[:5], 2], limit=4) == passage[6:]
    assert drafted(remembering([]), [*passage, 1, *passage[:3], 2], limit=4) == []  # too little agrees
    assert drafted(remembering([]), [*passage, 3, 2, 5, 1, *passage[:5], 3, 2], limit=1) == [5]  # no change: this came before


def test_more_of_an_answer_agreeing_means_a_longer_draft() -> None:
    answer = list(range(4, 30))
    proposer = LookupProposer("suffix")
    seq = request(1, [0])
    proposer.begin(seq, 0)
    seq.extend(answer)
    proposer.end(seq)
    lengths = [len(drafted(proposer, answer[:size])) for size in range(1, 12)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 1
    assert lengths[-1] == NUM_TOKENS["suffix"]


def test_past_answers_stay_within_their_bound_and_the_oldest_go_first() -> None:
    proposer = remembering([[4, 5], *([[6, token] for token in range(10, 40)])], max_past_tokens=50)
    assert len(proposer._past[""]) == 50
    assert drafted(proposer, [4]) == []
    assert drafted(proposer, [6], limit=1) == [39]
    assert not remembering([[4, 5]], max_past_tokens=0)._past[""]
    assert drafted(remembering([[4, 5, 6, 7]], max_past_tokens=3), [6]) == [7]

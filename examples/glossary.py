"""The starter with functions of one's own in the middle: acronyms are spelt out before they are spoken."""

import re

from omnistage import Graph, Omni
from omnistage.serving.requests import TextDelta

GLOSSARY = {"CPU": "central processing unit", "DNA": "deoxyribonucleic acid", "RAM": "main memory"}


def spell_out(text: str) -> str:  # called with a sentence at a time, in a process of its own
    return re.sub(r"\b[A-Z]+\b", lambda word: GLOSSARY.get(word[0], word[0]), text)


def build_graph() -> Graph:
    graph = Graph("glossary", model="starter")
    thinker, talker, vocoder = graph.llm("thinker"), graph.generator("talker"), graph.vocoder("vocoder")
    glossary = graph.function("glossary", spell_out)
    capitals = graph.function("capitals", "builtins:str.upper", granularity="delta")  # by name, as it comes
    for producer, consumer in [(thinker, glossary), (glossary, capitals), (glossary, talker)]:
        graph.connect(producer, consumer, stream=True)
    graph.connect(talker, vocoder, stream=True, first_chunk=24, chunk=64)  # frames of 11.6 ms
    graph.output(text=capitals, audio=vocoder)
    return graph


def main() -> None:
    questions = [{"role": "user", "content": f"Explain {word} in two sentences."} for word in GLOSSARY]
    batch = [{"messages": [question], "temperature": 0, "max_tokens": 80} for question in questions]
    with Omni(build_graph()) as omni:
        for answer in omni.generate(batch):  # all at once
            print(answer.text)
        for event in omni.stream({**batch[0], "modalities": ["text", "audio"], "audio": {"format": "wav"}}):
            print(f"\n{event.text}" if isinstance(event, TextDelta) else ".", end="", flush=True)


if __name__ == "__main__":
    main()

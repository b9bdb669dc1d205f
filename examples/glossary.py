"""The starter with two functions of one's own in it: acronyms are spelt out before they are spoken."""

import re

from omnistage import Graph, Omni
from omnistage.serving.requests import AudioDelta, TextDelta

GLOSSARY = {"CPU": "central processing unit", "DNA": "deoxyribonucleic acid", "RAM": "main memory"}


def spell_out(text: str) -> str:  # gets one sentence at a time, in a process of its own
    return re.sub(r"\b[A-Z]+\b", lambda word: GLOSSARY.get(word[0], word[0]), text)


def upper_case(text: str) -> str:
    return text.upper()


def build_graph() -> Graph:
    graph = Graph("glossary", model="starter")
    vision, hearing = graph.encoder("vision"), graph.encoder("hearing")
    thinker, talker, vocoder = graph.llm("thinker"), graph.generator("talker"), graph.vocoder("vocoder")
    glossary, loud = graph.function("glossary", spell_out), graph.function("loud", upper_case)
    for producer, consumer in [(vision, thinker), (hearing, thinker)]:
        graph.connect(producer, consumer)
    for producer, consumer in [(thinker, glossary), (glossary, loud), (glossary, talker), (talker, vocoder)]:
        graph.connect(producer, consumer, stream=True)
    graph.output(text=loud, audio=vocoder)
    return graph


def ask(question: str, **more: object) -> dict[str, object]:
    message = {"role": "user", "content": question}
    return {"messages": [message], "temperature": 0, "max_tokens": 60, **more}


def main() -> None:
    with Omni(build_graph()) as omni:
        for answer in omni.generate([ask("What does a CPU do?"), ask("What is DNA?")]):
            print(answer.text)
        for event in omni.stream(ask("What is RAM?", modalities=["text", "audio"], audio={"format": "wav"})):
            if isinstance(event, TextDelta):
                print(event.text)
            elif isinstance(event, AudioDelta):
                print(f"... {len(event.pcm) / event.sample_rate:.2f} s of speech")


if __name__ == "__main__":
    main()

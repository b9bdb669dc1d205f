"""Talks to `make serve` with OpenAI's own client: a picture and a voice in, text and speech out.

pip install openai
python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import base64
import sys
from pathlib import Path

from openai import OpenAI

MEDIA = Path(__file__).parent / "media"


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def ask(client: OpenAI) -> None:
    """A picture and a spoken question in; text and speech out, both as they are made."""
    picture = "data:image/png;base64," + encoded(MEDIA / "chelsea.png")
    question = {"data": encoded(MEDIA / "question.wav"), "format": "wav"}
    parts = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "input_audio", "input_audio": question},
    ]
    chunks = client.chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": parts}],
        modalities=["text", "audio"],
        audio={"voice": "joe", "format": "wav"},
        temperature=0,
        stream=True,
    )
    with open("answer.wav", "wb") as file:
        for chunk in chunks:
            audio = chunk.choices[0].delta.model_dump().get("audio") or {}
            print(audio.get("transcript") or "", end="", flush=True)
            file.write(base64.b64decode(audio.get("data") or ""))
    print()


def say(client: OpenAI, text: str, path: Path) -> None:
    """Text to speech, without a language model."""
    with client.audio.speech.with_streaming_response.create(
        model="starter", voice="joe", input=text, response_format="mp3"
    ) as response:
        response.stream_to_file(path)


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    with OpenAI(base_url=url, api_key="unused") as client:
        ask(client)
        say(client, "The quick brown fox jumps over the lazy dog.", Path("fox.mp3"))
        with open("fox.mp3", "rb") as clip:
            print(client.audio.transcriptions.create(model="starter", file=clip).text)


if __name__ == "__main__":
    main()

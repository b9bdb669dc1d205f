"""Draws the pictures of the documentation with the product itself: the starter's graph and one request.

    python docs/make_pictures.py

The request is a picture with a spoken question, answered in text and speech.  Others go before it, with
other media, so that its times are those of a pipeline that is warm.  Run it on a quiet machine.
"""

from pathlib import Path
from typing import Any

from omnistage.graph import load_pipeline
from omnistage.graph.draw import to_svg
from omnistage.serving.omni import Omni
from omnistage.serving.requests import Done
from omnistage.serving.timeline import Recorder, Timeline
from omnistage.serving.timeline_svg import timeline_as_svg

DOCS = Path(__file__).resolve().parent
EXAMPLES, TEST_DATA = DOCS.parent / "examples" / "media", DOCS.parent / "tests" / "data"


def spoken_question(picture: Path, clip: Path) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": picture.as_uri()}},
        {"type": "audio_url", "audio_url": {"url": clip.as_uri()}},
    ]
    return {
        "messages": [{"role": "user", "content": parts}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "temperature": 0,
        "max_completion_tokens": 64,
    }


def timeline_of(omni: Omni, request: dict[str, Any]) -> Timeline:
    recorder = Recorder()
    for event in omni.stream(request):
        recorder.observe(event)
    assert isinstance(event, Done)
    return recorder.timeline(event)


def main() -> None:
    (DOCS / "starter-graph.svg").write_text(to_svg(load_pipeline("starter")), encoding="utf-8")
    with Omni("starter") as omni:
        for picture, clip in (
            ("coffee.jpg", "speech_amiable.wav"),
            ("astronaut.jpg", "speech_young_man.wav"),
        ):
            timeline_of(omni, spoken_question(TEST_DATA / picture, TEST_DATA / clip))
        timeline = timeline_of(omni, spoken_question(EXAMPLES / "chelsea.png", EXAMPLES / "question.wav"))
    (DOCS / "starter-timeline.svg").write_text(timeline_as_svg(timeline), encoding="utf-8")


if __name__ == "__main__":
    main()

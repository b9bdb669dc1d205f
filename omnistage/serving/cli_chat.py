"""`omnistage chat`: a conversation in the terminal, with pictures, clips and spoken answers."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from omnistage.errors import OmnistageError
from omnistage.serving.cli_pipeline import Talker, open_talker
from omnistage.serving.cli_run import print_answer, question_parts, request_body, write_sound
from omnistage.serving.protocol import nearest
from omnistage.serving.timeline import timeline_as_text

HELP = """\
/image FILE    add a picture to the next message
/audio FILE    say a clip, with whatever was added before
/say on|off    speak answers into answer-1.wav, answer-2.wav, ...
/time          show where the last answer's time went
/reset         forget the conversation
/quit          leave (so does Ctrl-D); Ctrl-C stops an answer"""

_COMMANDS = ("image", "audio", "say", "time", "reset", "quit", "help")


def chat(options: Namespace) -> int:
    talker = open_talker(options)
    try:
        Conversation(talker, options).run()
    finally:
        talker.close()
    return 0


class Conversation:
    """History and what the next message will carry."""

    def __init__(self, talker: Talker, options: Namespace) -> None:
        self._talker = talker
        self._options = options
        self._history: list[dict[str, Any]] = []
        self._images: list[Path] = []
        self._speaks = False
        self._num_spoken = 0
        self._last_timeline = "nothing was answered yet"

    def run(self) -> None:
        """Until /quit, Ctrl-D, or Ctrl-C at the prompt."""
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            if not line:
                continue
            try:
                if not self._handle(line):
                    return
            except OmnistageError as error:
                print(f"! {error.message}", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n(stopped)")

    def _handle(self, line: str) -> bool:
        """False if the conversation is over."""
        if not line.startswith("/"):
            self._ask(question_parts(line, images=self._images))
            return True
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        match name:
            case "quit":
                return False
            case "help":
                print(HELP)
            case "time":
                print(self._last_timeline)
            case "reset":
                self._history.clear()
                self._images.clear()
            case "image" if argument:
                question_parts(
                    None, images=[Path(argument).expanduser()]
                )  # complain now, not at the next message
                self._images.append(Path(argument).expanduser())
                print("(added to the next message)")
            case "audio" if argument:
                self._ask(question_parts(None, images=self._images, clips=[Path(argument).expanduser()]))
            case "say" if argument in ("on", "off"):
                self._speaks = argument == "on"
            case "image" | "audio" | "say":
                print(f"! /{name} needs {'on or off' if name == 'say' else 'a file'}", file=sys.stderr)
            case _:
                print(f"! there is no /{name}{nearest(name, _COMMANDS)}", file=sys.stderr)
        return True

    def _ask(self, content: list[dict[str, Any]]) -> None:
        """Both messages enter the history once the answer is complete."""
        question = {"role": "user", "content": content}
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        body = request_body(self._options, [*system, *self._history, question], speak=self._speaks)
        answer = print_answer(self._talker.stream(body))
        self._history += [question, {"role": "assistant", "content": answer.text}]
        self._images = []
        self._last_timeline = timeline_as_text(answer.timeline)
        if self._speaks:
            self._num_spoken += 1
            path = self._options.out_dir / f"answer-{self._num_spoken}.wav"
            write_sound(path, answer)
            print(f"({path}: {answer.timeline.audio_seconds:.1f} s)")

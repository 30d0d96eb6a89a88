"""A conversation at the terminal: what is said goes to the policies, what begins with / to here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

from rlhf_cli import failure
from rlhf_cli.chat_input import Entry, ReadLine, entries
from rlhf_cli.chat_screen import screen_for
from stages.errors import ConfigError, Interrupted, RlhfError
from stages.runtime.signals import Stopped, StopRequest

if TYPE_CHECKING:
    from stages.chat import Chat
    from stages.conversation import Question
    from stages.runtime.reporter import Reporter

HELP = (
    "/system TEXT     tell the model how to behave; without TEXT, no more",
    "/regenerate      another answer to what was said last",
    "/compare POLICY  let a second policy answer as well; /compare off ends it",
    "/reset           forget the conversation",
    "/help            this list",
    "/quit            leave, as Ctrl-D does",
    'A line that ends in \\ goes on with the next; """ begins and ends a text of several lines.',
    "Ctrl-C ends an answer; a second Ctrl-C, or one at the prompt, leaves.",
)


class ChatSession:
    """What is said, turn after turn, until the person leaves or the pipe ends.

    Args:
        chat: the policies.
        reporter: hears of what is no answer.
        person: whether somebody types, who is told of an error and goes on; a pipe ends with it.
        as_json: whether each answer is an object.
    """

    def __init__(self, chat: Chat, reporter: Reporter, *, person: bool, as_json: bool) -> None:
        self.chat, self.reporter = chat, reporter
        self.person, self.as_json = person, as_json
        self.commands: dict[str, Callable[[str], None]] = {
            "/system": self._system,
            "/regenerate": self._regenerate,
            "/compare": self._compare,
            "/reset": self._reset,
            "/help": self._help,
            "/quit": self._quit,
        }

    def run(self, read: ReadLine) -> None:
        """Read and answer to the end.

        Raises:
            RlhfError: something in a pipe cannot be answered.
            Interrupted: a signal ended it.
            typer.Exit: the person leaves.
        """
        if self.person:
            self.reporter.note(f"{self.chat.options.policy} listens; /help lists the commands")
        try:
            for entry in entries(read):
                self._take(entry)
        except KeyboardInterrupt as error:
            if not self.person:
                raise
            print(file=sys.stderr)
            raise typer.Exit(128 + getattr(error, "signum", signal.SIGINT)) from None

    def _take(self, entry: Entry) -> None:
        try:
            if entry.command:
                self._obey(entry.text)
            else:
                self._answer(self.chat.ask(entry.text))
        except RlhfError as error:
            if isinstance(error, Interrupted) or not self.person:
                raise
            print(failure.as_text(failure.explain(error)), file=sys.stderr, flush=True)

    def _obey(self, text: str) -> None:
        word, *rest = text.split(maxsplit=1)
        if word not in self.commands:
            raise ConfigError(
                f"there is no command {word}",
                do='see /help, or begin and end a text that is to start with a slash with """',
            )
        self.commands[word]("".join(rest).strip())

    def _answer(self, questions: Sequence[Question]) -> None:
        """The answers of all policies; the first Ctrl-C ends them, the second the process."""
        policies = [question.conversation.speaker.source for question in questions]
        shown = screen_for(policies, sys.stdout, as_json=self.as_json, person=self.person)
        with StopRequest(_leave) as stop, shown as screen:
            for question in questions:
                screen.begin(question.conversation.speaker.source)
                screen.end(self.chat.answer(question, screen.piece, lambda: bool(stop.signum)))
        if stop.signum and not (self.person and stop.signum == signal.SIGINT):
            raise Interrupted(stop.signum, what="interrupted", do="run the same command again")

    def _system(self, text: str) -> None:
        self.chat.set_system(text or None)
        self.reporter.note("the system text holds from now on" if text else "no system text")

    def _regenerate(self, _: str) -> None:
        if self.chat.options.temperature == 0:
            self.reporter.note("at temperature 0 every answer to the same turn is the same")
        self._answer(self.chat.ask_again())

    def _compare(self, policy: str) -> None:
        if not policy:
            raise ConfigError(
                "no policy is named", where="/compare", do="name a policy, or off to end it"
            )
        if policy == "off":
            self.chat.compare_no_more()
            self.reporter.note(f"{self.chat.options.policy} answers alone")
        else:
            self.chat.compare(policy)
            self.reporter.note(f"{policy} answers as well")

    def _reset(self, _: str) -> None:
        self.chat.reset()
        self.reporter.note("the conversation is forgotten")

    def _help(self, _: str) -> None:
        for line in HELP:
            print(line, file=sys.stderr, flush=True)

    def _quit(self, _: str) -> None:
        raise typer.Exit


def _leave(signum: int) -> NoReturn:
    """Not at once: what is redrawn on a terminal has hidden its cursor."""
    raise Stopped(signum)

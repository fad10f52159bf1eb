"""All programs by name."""

from __future__ import annotations

from icebear.concepts.truth.number_programs import NUMBER_PROGRAMS
from icebear.concepts.truth.word_programs import WORD_PROGRAMS

PROGRAMS = {program.name: program for program in (*WORD_PROGRAMS, *NUMBER_PROGRAMS)}

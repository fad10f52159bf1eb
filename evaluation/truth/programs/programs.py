"""All programs by name."""

from __future__ import annotations

from icebear.evaluation.truth.programs.number_programs import NUMBER_PROGRAMS
from icebear.evaluation.truth.programs.word_programs import WORD_PROGRAMS

PROGRAMS = {program.name: program for program in (*WORD_PROGRAMS, *NUMBER_PROGRAMS)}

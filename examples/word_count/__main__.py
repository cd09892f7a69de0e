"""``python -m word_count``."""

from gazette import runconsumer
from word_count.app import WordCount

runconsumer.main(WordCount())

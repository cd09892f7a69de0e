"""``python -m word_count``."""

from gazette import runconsumer
from word_count.app import WordCount

runconsumer.main(WordCount(), bind_host="127.0.0.1")

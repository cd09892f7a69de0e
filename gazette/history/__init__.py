"""The history of journals, read in parallel: fragments in, committed messages out.

A shard reads a journal from begin to end. Here many tasks read a journal, and each task reads some of its
fragments. A task lacks two facts: the clocks that producers had acknowledged before its bytes, and the fates
of messages that are pending at the end of its bytes. Two passes supply these facts.

1. `take_snapshot` lists the fragments, and fixes a `snapshot.Snapshot`. Its `Run`s of fragments are the
tasks.
2. `first_pass` makes a summary of each run: how the run changes the state of a producer, whatever the state
before. A summary has a constant size per producer, and summaries of parts combine. `summary_store` keeps the
summaries of fragments, since fragments never change.
3. `fold` combines the summaries in the order of each journal, on one machine. It gives every run the states
at its begin, and the fates of messages that are pending at its end. The state at the end of a journal is the
checkpoint of a consumer that has read the journal.
4. `commit_filter` then sequences each run separately. `rows` and `read` return its messages.

The result equals the result of `gazette.message.sequencer.sequencer.Sequencer`, which is the specification.
"""

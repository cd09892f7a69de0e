"""The history of journals, read in parallel: fragments in, committed messages out.

A shard reads a journal from its begin to its end, one message after the other. What is stored of a
journal can be read by as many tasks as it has fragments, if each of them knows what it cannot see:
which producers had acknowledged what before its bytes, and what becomes of messages that are pending
where its bytes end. Two passes give it that.

1. `take` lists what there is, and fixes a `snapshot.Snapshot`. Its `Run`s of fragments are the tasks.
2. `summary.summarise` tells of each run, in constant size per producer, how it changes a producer's
   state, whatever that was before.
3. `fold` goes through the summaries in the order of each journal, on one machine. Every run gets the
   states at its begin and the fates of what is pending at its end; what comes out at the end of a
   journal is the checkpoint of a consumer that has read it.
4. `commit_filter` then sequences each run by itself, and `rows` or `read` give out its messages.

Their result equals that of `gazette.message.sequencer.Sequencer`, which is the specification.
"""

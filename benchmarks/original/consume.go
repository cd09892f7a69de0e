package main

import (
	pb "go.gazette.dev/core/broker/protocol"
	"go.gazette.dev/core/consumer"
	"go.gazette.dev/core/consumer/recoverylog"
	"go.gazette.dev/core/mainboilerplate/runconsumer"
	"go.gazette.dev/core/message"
)

// counter counts words in memory. Its store writes all counts to a JSON file with each transaction.
type counter struct{}

type counts struct {
	Words map[string]int64
}

func (*counter) NewConfig() runconsumer.Config { return new(runconsumer.BaseConfig) }

func (*counter) InitApplication(runconsumer.InitArgs) error { return nil }

func (*counter) NewStore(_ consumer.Shard, recorder *recoverylog.Recorder) (consumer.Store, error) {
	return consumer.NewJSONFileStore(recorder, &counts{Words: make(map[string]int64)})
}

func (*counter) NewMessage(*pb.JournalSpec) (message.Message, error) { return new(word), nil }

func (*counter) ConsumeMessage(
	_ consumer.Shard, store consumer.Store, envelope message.Envelope, _ *message.Publisher,
) error {
	var one = envelope.Message.(*word)
	store.(*consumer.JSONFileStore).State.(*counts).Words[one.Word] += one.Count
	return nil
}

func (*counter) FinalizeTxn(consumer.Shard, consumer.Store, *message.Publisher) error { return nil }

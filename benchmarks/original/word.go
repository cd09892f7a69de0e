package main

import (
	"fmt"

	pb "go.gazette.dev/core/broker/protocol"
	"go.gazette.dev/core/message"
)

const (
	golden = 0x9E3779B97F4A7C15
	words  = 5000
)

// word is the message of tools/bench/app.py: a hundred bytes of JSON.
type word struct {
	UUID  message.UUID `json:"uuid"`
	Word  string       `json:"word"`
	Count int64        `json:"count"`
	Sent  int64        `json:"sent"`
}

func (w *word) GetUUID() message.UUID                         { return w.UUID }
func (w *word) SetUUID(uuid message.UUID)                     { w.UUID = uuid }
func (w *word) NewAcknowledgement(pb.Journal) message.Message { return new(word) }

// wordOf returns the message that message_of of tools/bench/app.py returns for the same index.
func wordOf(index uint64) *word {
	var spread = index * golden
	return &word{
		Word:  fmt.Sprintf("word-%05d", (spread>>40)%words),
		Count: 1,
		Sent:  10_000_000_000_000 + int64(spread>>24),
	}
}

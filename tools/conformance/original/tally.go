// Command tally is a consumer of the Go original, for `make conformance`, which says how to build it.
//
// It counts words. A message of the source names a word, and the new count of that word is published to the journal
// that the label "output" of the shard names. The label "store" says where counts are: sqlite, rocksdb or json.
// tools/conformance/tally.py is the same application in Python, with the same form of its state.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"

	pb "go.gazette.dev/core/broker/protocol"
	"go.gazette.dev/core/consumer"
	"go.gazette.dev/core/consumer/recoverylog"
	store_rocksdb "go.gazette.dev/core/consumer/store-rocksdb"
	store_sqlite "go.gazette.dev/core/consumer/store-sqlite"
	"go.gazette.dev/core/labels"
	"go.gazette.dev/core/mainboilerplate/runconsumer"
	"go.gazette.dev/core/message"
)

const schema = `
	CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY NOT NULL, n INTEGER NOT NULL, filler BLOB);
	CREATE INDEX IF NOT EXISTS word_by_n ON word (n);
`

// count is a message of the source, without a total, or of the output.
type count struct {
	UUID  message.UUID `json:"uuid"`
	Word  string       `json:"word"`
	Total int64        `json:"total"`
}

func (c *count) GetUUID() message.UUID                         { return c.UUID }
func (c *count) SetUUID(uuid message.UUID)                     { c.UUID = uuid }
func (c *count) NewAcknowledgement(pb.Journal) message.Message { return new(count) }

type tally struct{}

func (tally) NewConfig() runconsumer.Config                       { return new(struct{ runconsumer.BaseConfig }) }
func (tally) InitApplication(runconsumer.InitArgs) error          { return nil }
func (tally) NewMessage(*pb.JournalSpec) (message.Message, error) { return new(count), nil }

func (tally) NewStore(shard consumer.Shard, recorder *recoverylog.Recorder) (consumer.Store, error) {
	switch kind := shard.Spec().LabelSet.ValueOf("store"); kind {
	case "sqlite":
		store, err := store_sqlite.NewStore(recorder)
		if err != nil {
			return nil, err
		}
		if mode := shard.Spec().LabelSet.ValueOf("journal"); mode != "" {
			store.SQLiteURIValues.Set("_journal_mode", mode)
		}
		if err = store.Open(schema); err != nil {
			return nil, err
		}
		if name := shard.Spec().LabelSet.ValueOf("attached"); name != "" {
			if _, err = store.SQLiteDB.Exec(fmt.Sprintf("ATTACH DATABASE '%s' AS %s", store.URIForDB(name+".db"), name)); err == nil {
				_, err = store.SQLiteDB.Exec(fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s.seen (w TEXT, n INTEGER)", name))
			}
		}
		return store, err
	case "rocksdb":
		store := store_rocksdb.NewStore(recorder)
		return store, store.Open()
	case "json":
		state := make(map[string]int64)
		return consumer.NewJSONFileStore(recorder, &state)
	default:
		return nil, fmt.Errorf("unknown store %q", kind)
	}
}

func (tally) ConsumeMessage(shard consumer.Shard, store consumer.Store, env message.Envelope, pub *message.Publisher) error {
	if message.GetFlags(env.GetUUID()) == message.Flag_ACK_TXN {
		return nil // The original delivers acknowledgements like messages.
	}
	word := env.Message.(*count).Word
	total, err := add(shard, store, word)
	if err != nil {
		return err
	}
	output := pb.Journal(shard.Spec().LabelSet.ValueOf("output"))
	mapping := func(message.Mappable) (pb.Journal, string, error) { return output, labels.ContentType_JSONLines, nil }
	_, err = pub.PublishUncommitted(mapping, &count{Word: word, Total: total})
	return err
}

func add(shard consumer.Shard, store consumer.Store, word string) (total int64, err error) {
	switch s := store.(type) {
	case *store_sqlite.Store:
		var txn *sql.Tx
		if txn, err = s.Transaction(context.Background(), nil); err != nil {
			return 0, err
		}
		// The filler makes the database larger than one page, and its changes larger than one buffer.
		if _, err = txn.Exec(`INSERT INTO word VALUES (?, 1, randomblob(500)) ON CONFLICT (w) DO UPDATE SET n = n + 1`, word); err != nil {
			return 0, err
		}
		if err = txn.QueryRow(`SELECT n FROM word WHERE w = ?`, word).Scan(&total); err != nil {
			return 0, err
		}
		if name := shard.Spec().LabelSet.ValueOf("attached"); name != "" {
			_, err = txn.Exec(fmt.Sprintf("INSERT INTO %s.seen VALUES (?, ?)", name), word, total)
		}
		return total, err
	case *store_rocksdb.Store:
		// Reads do not see the batch of the running transaction, so a cache does.
		counts, _ := s.Cache.(map[string]int64)
		if counts == nil {
			counts = make(map[string]int64)
			s.Cache = counts
		}
		if _, ok := counts[word]; !ok {
			value, err := s.DB.GetBytes(s.ReadOptions, []byte(word))
			if err != nil {
				return 0, err
			}
			if value != nil {
				if counts[word], err = strconv.ParseInt(string(value), 10, 64); err != nil {
					return 0, err
				}
			}
		}
		counts[word]++
		s.WriteBatch.Put([]byte(word), strconv.AppendInt(nil, counts[word], 10))
		return counts[word], nil
	case *consumer.JSONFileStore:
		state := *s.State.(*map[string]int64)
		state[word]++
		return state[word], nil
	}
	return 0, fmt.Errorf("not a store of tally: %T", store)
}

func (tally) FinalizeTxn(consumer.Shard, consumer.Store, *message.Publisher) error { return nil }

func main() { runconsumer.Main(tally{}) }

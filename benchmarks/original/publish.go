package main

import (
	"context"
	"encoding/json"
	"flag"
	"io"
	"log"
	"os"
	"strings"
	"syscall"
	"time"

	"go.gazette.dev/core/broker/client"
	pb "go.gazette.dev/core/broker/protocol"
	"go.gazette.dev/core/mainboilerplate"
	"go.gazette.dev/core/message"
)

// result is the one line that publish prints.
type result struct {
	Messages   int     `json:"messages"`
	Seconds    float64 `json:"seconds"`
	CPUSeconds float64 `json:"cpu_seconds"`
}

// publish sends messages one by one, each committed at once, and waits until brokers have all of them.
func publish(args []string) {
	var (
		flags    = flag.NewFlagSet("publish", flag.ExitOnError)
		address  = flags.String("broker.address", "", "endpoint of a broker")
		journals = flags.String("journals", "", "journals to publish to, with commas between them")
		count    = flags.Int("messages", 0, "number of messages")
	)
	must(flags.Parse(args))

	var ctx = context.Background()
	pb.RegisterGRPCDispatcher("local")

	var config mainboilerplate.ClientConfig
	config.Address = pb.Endpoint(*address)
	var journalClient = config.MustRoutedJournalClient(ctx)

	var include pb.LabelSet
	for _, name := range strings.Split(*journals, ",") {
		include.AddValue("name", name)
	}
	partitions, err := client.ListAllJournals(ctx, journalClient, pb.ListRequest{
		Selector: pb.LabelSelector{Include: include},
	})
	must(err)
	var mapping = message.ModuloMapping(
		func(m message.Mappable, key io.Writer) { _, _ = io.WriteString(key, m.(*word).Word) },
		func() *pb.ListResponse { return partitions },
	)

	var messages = make([]*word, *count)
	for index := range messages {
		messages[index] = wordOf(uint64(index))
	}
	var appends = client.NewAppendService(ctx, journalClient)
	var publisher = message.NewPublisher(appends, nil)
	var all = func(messages []*word) {
		for _, one := range messages {
			_, err := publisher.PublishCommitted(mapping, one)
			must(err)
		}
		for pending := range appends.PendingExcept("") {
			must(pending.Err())
		}
	}
	// Connect to brokers, and learn the routes of journals, before the measurement.
	all(messages[:(len(messages)+9)/10])

	var began, cpu = time.Now(), cpuSeconds()
	all(messages)
	must(json.NewEncoder(os.Stdout).Encode(result{
		Messages:   len(messages),
		Seconds:    time.Since(began).Seconds(),
		CPUSeconds: cpuSeconds() - cpu,
	}))
}

// cpuSeconds returns the processor time that this process has used.
func cpuSeconds() float64 {
	var usage syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import java.io.IOException;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.errors.SerializationException;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.state.KeyValueStore;

/**
 * The word count on Kafka Streams: {@code java StreamsCount ADDRESS DIRECTORY GUARANTEE GROUP STEP TOPIC
 * [MESSAGES]}.
 *
 * <p>Run by {@code compare.py}, which compiles it. Counts are in RocksDB, with a changelog topic.
 * With MESSAGES it first counts them all, so that its code has been compiled.
 */
public final class StreamsCount {
    private static final int THREADS = 2;
    private static final int COMMIT_MS = 1000;
    private static final int SESSION_MS = 10_000;
    private static final int POLL_MS = 100;

    record Counted(String word, long count) {}

    private StreamsCount() {}

    public static void main(String[] arguments) throws InterruptedException {
        if (arguments.length > 6) {
            warmUp(arguments, Long.parseLong(arguments[6]));
        }
        CountDownLatch closed = new CountDownLatch(1);
        KafkaStreams streams = new KafkaStreams(
                topology(arguments[5], Long.parseLong(arguments[4]), new AtomicLong()),
                settings(arguments, arguments[3]));
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            streams.close();
            closed.countDown();
        }));
        streams.start();
        closed.await();
    }

    /** Counts all messages as another application, so that what is measured has been compiled. */
    private static void warmUp(String[] arguments, long messages) throws InterruptedException {
        AtomicLong seen = new AtomicLong();
        Topology topology = topology(arguments[5], Long.MAX_VALUE, seen);
        try (KafkaStreams streams = new KafkaStreams(topology, settings(arguments, arguments[3] + "-warm"))) {
            streams.start();
            while (seen.get() < messages) {
                Thread.sleep(POLL_MS);
            }
        }
    }

    private static Topology topology(String topic, long step, AtomicLong seen) {
        StreamsBuilder builder = new StreamsBuilder();
        Materialized<String, Long, KeyValueStore<Bytes, byte[]>> counts = Materialized.as("counts");
        builder.stream(topic, Consumed.with(Serdes.String(), counted()))
                .mapValues(message -> {
                    long number = seen.incrementAndGet();
                    if (number % step == 0) {
                        // The clock of Python's time.perf_counter().
                        System.out.println(number + " " + System.nanoTime() / 1e9);
                    }
                    return message.count();
                })
                .groupByKey(Grouped.with(Serdes.String(), Serdes.Long()))
                .reduce(Long::sum, counts.withKeySerde(Serdes.String()).withValueSerde(Serdes.Long()));
        return builder.build();
    }

    private static Serde<Counted> counted() {
        ObjectReader reader = new ObjectMapper()
                .disable(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES)
                .readerFor(Counted.class);
        Deserializer<Counted> decode = (topic, data) -> {
            try {
                return reader.readValue(data);
            } catch (IOException error) {
                throw new SerializationException(error);
            }
        };
        return Serdes.serdeFrom((topic, message) -> {
            throw new UnsupportedOperationException("messages are only read");
        }, decode);
    }

    private static Properties settings(String[] arguments, String group) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, arguments[1]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, arguments[2]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, group);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, THREADS);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, COMMIT_MS);
        String session = StreamsConfig.mainConsumerPrefix(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG);
        settings.put(session, SESSION_MS);
        return settings;
    }
}

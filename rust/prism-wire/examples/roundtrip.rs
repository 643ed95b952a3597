//! What the hot path costs: appending a record, and a query answered by another process.
//!
//! Prints one line of JSON, `{"append_ns_median":…, "query_us_median":…, …}`. The answers are checked first.

#[cfg(prism_loom)]
fn main() {}

#[cfg(not(prism_loom))]
fn main() {
    session::main();
}

#[cfg(not(prism_loom))]
mod session {
    use prism_wire::client::Client;
    use prism_wire::frame::{DeviceMode, Hello};
    use prism_wire::message::{Record, RecordKind, Reply};
    use prism_wire::server::{Connection, Listener, handshake};
    use std::path::Path;
    use std::process::Command;
    use std::time::{Duration, Instant};

    const ENV_SOCKET: &str = "PRISM_EXAMPLE_SOCKET";
    const RING_RECORDS: u32 = 1 << 16;
    const NUM_CHECKS: u64 = 2000;
    const NUM_BATCHES: usize = 2000;
    /// Appends are timed in batches: reading the clock costs about as much as one append. All of them fit into the ring, so
    /// that the engine's speed does not matter.
    const BATCH: usize = 16;
    const NUM_QUERIES: usize = 20_000;

    pub(crate) fn main() {
        match std::env::var_os(ENV_SOCKET) {
            Some(socket) => play_process(Path::new(&socket)),
            None => play_engine(),
        }
    }

    fn play_engine() {
        let dir = std::env::temp_dir().join(format!("prism-roundtrip-{}", std::process::id()));
        let listener = Listener::bind(&dir).expect("a private directory for the socket");
        let mut process = Command::new(std::env::current_exe().expect("this program has a path"))
            .env(ENV_SOCKET, listener.path())
            .spawn()
            .expect("this program runs again");
        let stream = listener.accept(Duration::from_secs(10)).expect("the socket works").expect("the process connects");
        let connection = handshake(stream, |_| Ok(String::new()), RING_RECORDS).expect("the process says hello");
        serve(connection);
        drop(listener);
        std::fs::remove_dir(&dir).expect("the directory is empty again");
        assert!(process.wait().expect("the process ends").success());
    }

    fn serve(connection: Connection) {
        let Connection { control: _control, mut records, replies, .. } = connection;
        let mut batch = Vec::new();
        while !records.is_closed() {
            records.wait(Duration::from_secs(1));
            records.pop_batch(&mut batch, 1024);
            for record in batch.drain(..) {
                if record.kind == RecordKind::StreamSync as u16 {
                    replies.answer(record.h, expected(&record)).expect("the process waits for the answer");
                }
            }
        }
    }

    fn expected(query: &Record) -> Reply {
        Reply { value: (query.a * 3) as i64, host_ns: query.host_ns + 7, ..Reply::default() }
    }

    fn query(a: u64) -> Record {
        Record { kind: RecordKind::StreamSync as u16, a, host_ns: a as i64, ..Record::default() }
    }

    fn play_process(socket: &Path) {
        let client = Client::connect(socket, &Hello::new(0, 1, DeviceMode::Host)).expect("the engine listens");
        for a in 0..NUM_CHECKS {
            assert_eq!(client.query(query(a)), Ok(expected(&query(a))));
        }
        let launch = Record { kind: RecordKind::Kernel as u16, a: 1, ..Record::default() };
        let mut appends = sample(NUM_BATCHES, || {
            for _ in 0..BATCH {
                client.append(&launch).expect("the engine lives");
            }
        });
        let mut queries = sample(NUM_QUERIES, || {
            client.query(query(1)).expect("the engine lives");
        });
        // Queries that find the engine asleep, as after a stretch of computing.
        let mut cold = sample_after(200, Duration::from_millis(1), || {
            client.query(query(1)).expect("the engine lives");
        });
        let per_append = |ns: u64| ns as f64 / BATCH as f64;
        report(&format!(
            "{{\"append_ns_median\": {:.1}, \"append_ns_p99\": {:.1}, \"query_us_median\": {:.2}, \"query_us_p99\": {:.2}, \
             \"query_idle_us_median\": {:.2}}}",
            per_append(quantile(&mut appends, 0.5)),
            per_append(quantile(&mut appends, 0.99)),
            quantile(&mut queries, 0.5) as f64 / 1e3,
            quantile(&mut queries, 0.99) as f64 / 1e3,
            quantile(&mut cold, 0.5) as f64 / 1e3,
        ));
    }

    #[allow(clippy::print_stdout, reason = "the result of the program")]
    fn report(line: &str) {
        println!("{line}");
    }

    fn sample(count: usize, body: impl FnMut()) -> Vec<u64> {
        sample_after(count, Duration::ZERO, body)
    }

    fn sample_after(count: usize, pause: Duration, mut body: impl FnMut()) -> Vec<u64> {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
            let start = Instant::now();
            body();
            samples.push(start.elapsed().as_nanos() as u64);
        }
        samples
    }

    fn quantile(samples: &mut [u64], q: f64) -> u64 {
        samples.sort_unstable();
        samples[((samples.len() - 1) as f64 * q) as usize]
    }
}

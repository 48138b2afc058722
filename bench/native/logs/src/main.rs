//! Appends of 100 bytes to a write-ahead log of Rust, each durable before it returns (P32).
//!
//! `write-ahead-logs NAME DIRECTORY` opens the log, prints "ready", and answers each line of its
//! input by one line:
//!
//! - `latencies COUNT`: the duration of each of so many appends of one thread, in nanoseconds
//! - `rate THREADS SECONDS`: appends a second of so many threads together
//!
//! | log | an append | its flush |
//! |---|---|---|
//! | okaywal | `begin_entry`, `write_chunk`, `commit` | `fdatasync`, shared by all that wait; preallocated segments |
//! | wal-db | `append_and_sync` | `fdatasync`, shared by all that wait; a growing file |
//! | fjall | a batch of one row, `PersistMode::SyncData` | `fdatasync` of its journal, one each |
//! | redb | a transaction of one row, `Durability::Immediate` | `fdatasync` of its file, one each |
//! | walrus | `append_for_topic`, `FsyncSchedule::SyncEach`; a topic for each thread | its file is open with `O_SYNC`, and `fsync` follows |

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use okaywal::{LogVoid, WriteAheadLog};
use redb::{Durability, TableDefinition};
use wal_db::Wal;
use walrus_rust::{FsyncSchedule, ReadConsistency, Walrus};

const VALUE: [u8; 100] = [7; 100];
const ROWS: TableDefinition<u64, &[u8]> = TableDefinition::new("log");

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// A log to which several threads may append.
trait Log: Sync {
    /// Append a message; it survives a power loss once this returns. `thread` is the caller's
    /// number.
    fn append(&self, thread: usize) -> Outcome;
}

impl Log for WriteAheadLog {
    fn append(&self, _: usize) -> Outcome {
        let mut entry = self.begin_entry()?;
        entry.write_chunk(&VALUE)?;
        entry.commit()?;
        Ok(())
    }
}

impl Log for Wal {
    fn append(&self, _: usize) -> Outcome {
        let _position = self.append_and_sync(&VALUE)?;
        Ok(())
    }
}

struct Fjall {
    database: Database,
    rows: Keyspace,
    next: AtomicU64,
}

impl Log for Fjall {
    fn append(&self, _: usize) -> Outcome {
        let key = self.next.fetch_add(1, Relaxed).to_be_bytes();
        let mut batch = self
            .database
            .batch()
            .durability(Some(PersistMode::SyncData));
        batch.insert(&self.rows, key, VALUE);
        batch.commit()?;
        Ok(())
    }
}

struct Redb {
    database: redb::Database,
    next: AtomicU64,
}

impl Log for Redb {
    fn append(&self, _: usize) -> Outcome {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        transaction
            .open_table(ROWS)?
            .insert(self.next.fetch_add(1, Relaxed), VALUE.as_slice())?;
        transaction.commit()?;
        Ok(())
    }
}

impl Log for Walrus {
    fn append(&self, thread: usize) -> Outcome {
        self.append_for_topic(&format!("topic-{thread}"), &VALUE)?;
        Ok(())
    }
}

/// A new log of this kind, in a directory of its own.
fn open(name: &str, directory: &Path) -> Outcome<Box<dyn Log>> {
    Ok(match name {
        "okaywal" => Box::new(WriteAheadLog::recover(directory, LogVoid)?),
        "wal-db" => Box::new(Wal::open(directory.join("log"))?),
        "fjall" => {
            let database = Database::builder(directory).open()?;
            let rows = database.keyspace("log", KeyspaceCreateOptions::default)?;
            Box::new(Fjall {
                database,
                rows,
                next: AtomicU64::new(0),
            })
        }
        "redb" => {
            let database = redb::Database::create(directory.join("log"))?;
            Box::new(Redb {
                database,
                next: AtomicU64::new(0),
            })
        }
        "walrus" => Box::new(Walrus::with_consistency_and_schedule(
            ReadConsistency::StrictlyAtOnce, // of readers, of which there are none
            FsyncSchedule::SyncEach,
        )?), // in WALRUS_DATA_DIR
        _ => return Err(format!("{name} is no log that this program knows").into()),
    })
}

fn latencies(log: &dyn Log, count: usize) -> Outcome<String> {
    let mut durations = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        log.append(0)?;
        durations.push(start.elapsed().as_nanos().to_string());
    }
    Ok(durations.join(" "))
}

/// Appends a second of all threads, which end with the append that they are in.
fn rate(log: &dyn Log, threads: usize, time: Duration) -> Outcome<String> {
    let start = Instant::now();
    let count_until_end = |thread| -> Outcome<u64> {
        let mut count = 0;
        while start.elapsed() < time {
            log.append(thread)?;
            count += 1;
        }
        Ok(count)
    };
    let counts = thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || count_until_end(thread)))
            .collect();
        running
            .into_iter()
            .map(|each| each.join().unwrap())
            .collect::<Result<Vec<_>, _>>()
    })?;
    Ok((counts.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64()).to_string())
}

fn answer(log: &dyn Log, line: &str) -> Outcome<String> {
    match *line.split_whitespace().collect::<Vec<_>>() {
        ["latencies", count] => latencies(log, count.parse()?),
        ["rate", threads, seconds] => rate(
            log,
            threads.parse()?,
            Duration::from_secs_f64(seconds.parse()?),
        ),
        _ => Err(format!("no command: {line}").into()),
    }
}

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, name, directory] = arguments.as_slice() else {
        return Err("write-ahead-logs NAME DIRECTORY".into());
    };
    std::fs::create_dir_all(directory)?;
    let log = open(name, Path::new(directory))?;
    let mut output = io::stdout();
    writeln!(output, "ready")?;
    for line in io::stdin().lock().lines() {
        writeln!(output, "{}", answer(&*log, &line?)?)?;
        output.flush()?;
    }
    Ok(())
}

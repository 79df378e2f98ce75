//! The C programs: built once, run as children of a world.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use csid_tests::world::{World, child};
use tokio::sync::mpsc;

/// The longest time of a program. Under valgrind all of it is slow.
const LIMIT: Duration = Duration::from_secs(240);

#[derive(Clone, Copy, Debug)]
pub enum As {
    /// With libcsi.so.1.
    Shared,
    /// With libcsi.a and AddressSanitizer, which finds leaks too.
    Sanitized,
    /// With libcsi.a under valgrind.
    Valgrind,
}

impl As {
    fn program(self) -> PathBuf {
        built().join(match self {
            Self::Shared => "shared",
            Self::Sanitized => "sanitized",
            Self::Valgrind => "static",
        })
    }
}

/// A source of the programs.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../libcsi-ffi/tests/c").join(name)
}

/// Returns the directory of libcsi as `link` makes it, with panics on demand, and of the programs. Builds both once.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let ffi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../libcsi-ffi");
        let out = csid_tests::world::program("csid-under-test").with_file_name("libcsi-under-test");
        run(Command::new(ffi.join("link")).arg(&out).args(["--features", "fault"]));
        let mut sources: Vec<_> =
            std::fs::read_dir(ffi.join("tests/c")).unwrap().map(|file| file.unwrap().path()).collect();
        sources.retain(|file| file.extension().is_some_and(|extension| extension == "c"));
        let (library, archive) = (out.join("lib"), out.join("lib/libcsi.a"));
        for way in ["shared", "sanitized", "static"] {
            let mut cc = Command::new("cc");
            cc.args(["-std=c99", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(out.join(way));
            cc.arg("-I").arg(out.join("include")).args(&sources);
            match way {
                "shared" => {
                    cc.arg("-L").arg(&library).arg("-lcsi").arg(format!("-Wl,-rpath,{}", library.display()))
                }
                "sanitized" => {
                    cc.args(["-fsanitize=address", "-fno-omit-frame-pointer"]).arg(&archive).arg("-lm")
                }
                _ => cc.arg(&archive).arg("-lm"),
            };
            run(&mut cc);
        }
        // As its own header comment says.
        let mut cc = Command::new("cc");
        cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror"]).arg(ffi.join("../examples/c/mini_scheduler.c"));
        cc.arg("-I").arg(out.join("include")).arg("-L").arg(&library).arg("-lcsi");
        run(cc.arg(format!("-Wl,-rpath,{}", library.display())).arg("-o").arg(out.join("mini_scheduler")));
        out
    })
}

fn run(command: &mut Command) {
    let done = command.output().expect("it starts");
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A C program that runs.
pub struct Program {
    name: &'static str,
    process: Child,
    answers: Option<ChildStdin>,
    lines: mpsc::UnboundedReceiver<String>,
    log: PathBuf,
}

impl Program {
    pub fn start(w: &World, name: &'static str, way: As, environment: &[(&str, &OsStr)]) -> Self {
        let program = way.program();
        let mut command = match way {
            As::Valgrind => {
                let mut command = child(Path::new("valgrind"));
                command.args([
                    "--quiet",
                    "--error-exitcode=99",
                    "--leak-check=full",
                    "--child-silent-after-fork=yes",
                ]);
                command.args(["--errors-for-leak-kinds=definite,indirect,possible"]).arg(program);
                command
            }
            _ => child(&program),
        };
        command.arg(name).envs(environment.iter().copied());
        Self::spawn(w, name, command)
    }

    /// Starts a program that finds csid by its environment.
    pub fn spawn(w: &World, name: &'static str, mut command: Command) -> Self {
        let log = w.path(&format!("{name}.log"));
        let mut process = command
            .env("CSID_SOCKET", w.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).expect("a log"))
            .spawn()
            .expect("the program starts");
        let (answers, said) = (process.stdin.take(), process.stdout.take().expect("a pipe"));
        let (sender, lines) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Program { name, process, answers, lines, log }
    }

    /// Waits until the program asks for `what`. The program waits for `answer`.
    pub async fn asks(&mut self, what: &str) {
        assert_eq!(self.says().await, what, "{}: {}", self.name, self.complaint());
    }

    /// Returns the program's next line.
    pub async fn says(&mut self) -> String {
        let line = tokio::time::timeout(LIMIT, self.lines.recv()).await.ok().flatten();
        line.unwrap_or_else(|| panic!("{} says nothing: {}", self.name, self.complaint()))
    }

    pub fn kill(mut self) {
        self.process.kill().expect("it is killed");
        self.process.wait().expect("its status");
    }

    /// Closes the program's standard input.
    pub fn close(&mut self) {
        self.answers = None;
    }

    pub fn answer(&mut self) {
        self.answers.as_mut().expect("a pipe").write_all(b"done\n").expect("the program reads");
    }

    /// Waits for the program's end, which has to be a success. Returns its output.
    pub async fn ends(mut self) -> String {
        let mut said = String::new();
        let reading = async {
            while let Some(line) = self.lines.recv().await {
                said += &line;
            }
        };
        let late = tokio::time::timeout(LIMIT, reading).await.is_err();
        if late {
            let _ = self.process.kill();
        }
        let status = self.process.wait().expect("its status");
        assert!(!late && status.success(), "{} {status}: {}", self.name, self.complaint());
        said
    }

    fn complaint(&self) -> String {
        let mut text = String::new();
        let _ = std::fs::File::open(&self.log).and_then(|mut log| log.read_to_string(&mut text));
        text
    }
}

//! Compiles the .proto files without protoc, and writes a `Debug` that redacts for every message with something in it that
//! must not be seen in a log.

use std::fmt::Write as _;
use std::path::PathBuf;

use protox::prost_reflect::{DescriptorPool, FieldDescriptor, MessageDescriptor, Value};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    println!("cargo::rerun-if-changed=csi/v1/csi.proto");
    println!("cargo::rerun-if-changed=pluginregistration/v1/api.proto");
    println!("cargo::rerun-if-changed=cluster/v1/cluster.proto");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);

    let mut compiler = protox::Compiler::new(["."])?;
    compiler.include_imports(true).include_source_info(true).open_file("csi/v1/csi.proto")?;
    std::fs::write(out.join("csi.v1.descriptors"), compiler.encode_file_descriptor_set())?;

    let server = std::env::var_os("CARGO_FEATURE_SERVER").is_some();
    let generate = || tonic_prost_build::configure().build_client(true).build_server(server);
    let csi = Package::of(&compiler, "csi.v1");
    generate()
        .btree_map(".")
        .skip_debug(csi.guarded().iter().map(|m| m.full_name()))
        .compile_fds(compiler.file_descriptor_set())?;
    generate().compile_fds(protox::compile(["pluginregistration/v1/api.proto"], ["."])?)?;
    std::fs::write(out.join("csi.v1.debug.rs"), csi.debug()? + &csi.debug_by_name()?)?;

    if std::env::var_os("CARGO_FEATURE_CLUSTER").is_some() {
        let mut compiler = protox::Compiler::new(["."])?;
        compiler.include_imports(true).open_file("cluster/v1/cluster.proto")?;
        let cluster = Package::of(&compiler, "csid.cluster.v1");
        generate()
            .btree_map(".")
            .skip_debug(cluster.guarded().iter().map(|m| m.full_name()))
            .compile_fds(compiler.file_descriptor_set())?;
        std::fs::write(out.join("csid.cluster.v1.debug.rs"), cluster.debug()?)?;
    }
    Ok(())
}

/// The messages of a package.
struct Package {
    pool: DescriptorPool,
    messages: Vec<MessageDescriptor>,
}

impl Package {
    fn of(compiler: &protox::Compiler, name: &str) -> Package {
        let pool = compiler.descriptor_pool();
        let is_own = |m: &MessageDescriptor| m.package_name() == name && !m.is_map_entry();
        let messages = pool.all_messages().filter(is_own).collect();
        Package { pool, messages }
    }

    /// Returns the messages with something that must not be seen in a log.
    fn guarded(&self) -> Vec<&MessageDescriptor> {
        self.messages.iter().filter(|m| m.fields().any(|f| hidden(&self.pool, &f))).collect()
    }

    /// Writes the `Debug` of the guarded messages.
    fn debug(&self) -> Result<String, Error> {
        let mut code = String::new();
        for message in self.guarded() {
            let path = rust_path(message);
            let name = message.name();
            write!(
                code,
                "impl ::core::fmt::Debug for {path} {{\n fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> \
                 ::core::fmt::Result {{\n  f.debug_struct({name:?})"
            )?;
            for field in members(message) {
                match field {
                    Member::Plain(name) => write!(code, ".field({name:?}, &self.{name})")?,
                    Member::Hidden(name) => {
                        write!(code, ".field({name:?}, &crate::Hidden(self.{name}.len()))")?
                    }
                }
            }
            code.push_str(".finish()\n }\n}\n");
        }
        Ok(code)
    }

    /// Writes a function for the tests: the `Debug` of any message by its name, so that they cannot forget one.
    fn debug_by_name(&self) -> Result<String, Error> {
        let mut code =
            "#[cfg(test)]\npub(crate) fn debug_of(name: &str, bytes: &[u8]) -> Option<String> {\n".to_owned();
        code.push_str(" use ::prost::Message;\n match name {\n");
        for message in &self.messages {
            let path = rust_path(message);
            let name = message.full_name();
            writeln!(
                code,
                "  {name:?} => {path}::decode(bytes).ok().map(|m| format!(\"{{m:?}}{{m:#?}}\")),"
            )?;
        }
        code.push_str("  _ => None,\n }\n}\n");
        Ok(code)
    }
}

/// What no log may show: secrets by their option, and by their names the two opaque contexts, the parameters (which
/// drivers use for credentials' names and worse) and mount flags (CO rule 17).
fn hidden(pool: &DescriptorPool, field: &FieldDescriptor) -> bool {
    let secret = pool.get_extension_by_name("csi.v1.csi_secret");
    secret.is_some_and(|option| *field.options().get_extension(&option) == Value::Bool(true))
        || matches!(
            field.name(),
            "mount_flags"
                | "volume_context"
                | "publish_context"
                | "parameters"
                | "mutable_parameters"
                | "hide"
        )
}

enum Member {
    Plain(String),
    Hidden(String),
}

/// The members of the struct that prost makes: a oneof is one member.
fn members(message: &MessageDescriptor) -> Vec<Member> {
    let mut members = Vec::new();
    for field in message.fields() {
        if hidden(message.parent_pool(), &field) {
            members.push(Member::Hidden(field.name().to_owned()));
        } else if field.containing_oneof().is_none() {
            members.push(Member::Plain(field.name().to_owned()));
        }
    }
    members.extend(message.oneofs().map(|oneof| Member::Plain(oneof.name().to_owned())));
    members
}

/// `csi.v1.A.BCd` is `a::BCd`, as prost names it.
fn rust_path(message: &MessageDescriptor) -> String {
    match message.parent_message() {
        None => message.name().to_owned(),
        Some(parent) => {
            let (outer, name) = match rust_path(&parent).rsplit_once("::") {
                Some((outer, name)) => (format!("{outer}::"), name.to_owned()),
                None => (String::new(), parent.name().to_owned()),
            };
            format!("{outer}{}::{}", snake(&name), rust_name(message.name()))
        }
    }
}

/// prost writes `RPC` as `Rpc`.
fn rust_name(name: &str) -> String {
    if name.chars().all(char::is_uppercase) {
        name[..1].to_owned() + &name[1..].to_lowercase()
    } else {
        name.to_owned()
    }
}

fn snake(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

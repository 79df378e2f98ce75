# Writes the files of an rpm as cargo-generate-rpm's metadata. The list is that of the deb, in a package's Cargo.toml: awk -f this Cargo.toml.
/^conf-files = / {
    line = $0
    while (match(line, /"[^"]+"/)) {
        config[substr(line, RSTART + 1, RLENGTH - 2)]
        line = substr(line, RSTART + RLENGTH)
    }
}

/^\[package\.metadata\.deb\]/ { in_deb = 1 }
/^\[/ && !/metadata\.deb\]/ { in_deb = 0 }
in_deb && /^assets = \[/ { in_assets = 1; print "assets = ["; next }
in_deb && /^name = / { split($0, part, "\""); package = part[2] }
# The deb has the license in its file `copyright`.
in_assets && /^\]/ {
    printf "    { source = \"LICENSE\", dest = \"/usr/share/licenses/%s/\", mode = \"644\", doc = true },\n]\n", package
    in_assets = 0
}

in_assets {
    split($0, part, "\"")
    source = part[2]; dest = "/" part[4]; mode = part[6]
    sub(/^\.\.\//, "", source)
    # Links, which cargo-generate-rpm would follow. The scriptlets make them.
    if (mode == "777") next
    # zsh of Debian reads another directory.
    sub(/\/zsh\/vendor-completions\//, "/zsh/site-functions/", dest)
    file = dest
    if (file ~ /\/$/) { name = source; sub(/.*\//, "", name); file = file name }
    marks = file in config ? ", config = \"noreplace\"" : ""
    if (dest ~ /\/share\/doc\//) marks = marks ", doc = true"
    printf "    { source = \"%s\", dest = \"%s\", mode = \"%s\"%s },\n", source, dest, mode, marks
}

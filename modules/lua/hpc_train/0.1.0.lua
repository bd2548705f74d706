-- hpc_train for Lmod. How to use and install it: docs/how-to/modules.md

------ A site may set these two lines, and nothing else ---------------------------------------
local prefix   = ""  -- The environment with bin/hpc-train. "" takes .venv of this checkout.
local requires = {}  -- Modules that it needs, such as {"python/3.11", "openmpi"}.
----------------------------------------------------------------------------------------------

-- A user's HPC_TRAIN_PREFIX wins over `prefix`. Unloading takes HPC_TRAIN_ROOT, which loading has
-- set, so that a variable that has changed since does not matter.
local given = os.getenv(mode() == "unload" and "HPC_TRAIN_ROOT" or "HPC_TRAIN_PREFIX") or ""
if given ~= "" then
   prefix = given
elseif prefix == "" then
   -- This file, with links to it resolved, is CHECKOUT/modules/lua/hpc_train/VERSION.lua.
   local checkout = abspath(myFileName()):match("(.*)/[^/]+/[^/]+/[^/]+/[^/]+$") or ""
   prefix = checkout .. "/.venv"
end
prefix = abspath(prefix) or prefix
local bin = pathJoin(prefix, "bin")

whatis("Name: hpc_train")
whatis("Version: " .. myModuleVersion())
whatis("Description: trains PyTorch models on HPC clusters over MPI and Horovod")

help([[
hpc_train trains PyTorch models on HPC clusters over MPI and Horovod.

    hpc-train doctor    says what works here, what does not, and how to mend it
    hpc-train --help    lists all commands

PATH gets $HPC_TRAIN_ROOT/bin; HPC_TRAIN_ROOT is ]] .. prefix .. [[.
PYTHONNOUSERSITE is set: Python does not look for packages in ~/.local.
]])

local rights = lfs.attributes(pathJoin(bin, "hpc-train"), "permissions") or ""
if mode() == "load" and not rights:find("x") then
   LmodError("there is no hpc-train in " .. bin .. ": install it there, or set HPC_TRAIN_PREFIX")
end
-- No conflict(): Lmod never has two versions of a module loaded.
for _, name in ipairs(requires) do
   depends_on(name)
end
prepend_path("PATH", bin)
-- pushenv brings back a value of the user's own.
pushenv("HPC_TRAIN_ROOT", prefix)
-- Packages in a user's ~/.local would be taken before those of the modules below the environment.
pushenv("PYTHONNOUSERSITE", "1")
